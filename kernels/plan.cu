// plan: from the lengths of a batch, which only the device knows, to a list of work for the blocks of mma_*.
//
// Grid:   1 block of 512 threads.
// Shared: 128 bytes (struct Smem).
// Global: work_scratch holds struct Scratch.
// Idea:   the row tiles of all requests lie end to end on one axis, each as long as its work: `work_start_tiles` for
//         its start, then its KV tiles. Block k of the kernel takes the k-th of equal pieces of the axis. A cut near
//         either end of a row tile moves there: nobody starts for a tile or two. The axis has the first row tile
//         of every request, then the second of every one: blocks that read the same KV at the same time share it in
//         the level-2 cache. Row tiles that see nothing cost 1, for their zeros.
//         Where lengths are alike, each block takes a piece of one row tile alone: all row tiles are then cut into runs
//         of about the same length, the shortest for which there are enough blocks.
//         Or, of more row tiles than blocks, equally many whole ones.
// Source: Stream-K (Osama et al., arXiv:2301.03598), on KV tiles in place of the reduction dim of a matrix product.
#include "work.cuh"

constexpr int THREADS = 512;
constexpr int WARPS = THREADS / WARP;

struct Smem {
  static constexpr u32 SUMS = 0;  // u64 [WARPS] of a scan
  static constexpr u32 BYTES = SUMS + WARPS * 8;
};

// --- row tiles -----------------------------------------------------------------------------------------------------

// A row tile of a request. Its number is row tile x B + request.
struct Span {
  Request request;
  RowTile rows;
  int index;  // row tile of the request
  int tiles;  // of KV
  int cost;   // 0: there are no such rows
};

DEVICE int num_spans(const VerifyParams& p) { return p.work_row_tiles * p.batch; }

DEVICE Span load_span(const VerifyParams& p, int number) {
  Span s;
  s.request = load_request(p, number % p.batch);
  s.index = number / p.batch;
  s.rows = row_tile(p, s.request, s.index * PLANNED_ROWS, PLANNED_ROWS);
  s.tiles = s.rows.end > s.rows.first ? num_tiles(p, s.request, s.rows) : 0;
  s.cost = s.rows.end <= s.rows.first ? 0 : s.tiles ? p.work_start_tiles + s.tiles : 1;
  return s;
}

// --- memory between the steps --------------------------------------------------------------------------------------

// Spans that exist, in order, and the cuts between blocks.
struct Cut {
  int span;  // of those that exist
  int tile;
};

struct Scratch {
  u64* begins;   // [spans + 1] where each existing span begins on the axis; after the last one, the axis's end
  u32* numbers;  // [spans] number of each existing span
  u32x2* cuts;   // [work_blocks + 1]
};

DEVICE Scratch scratch(const VerifyParams& p) {
  Scratch s;
  s.begins = (u64*)p.work_scratch;
  s.cuts = (u32x2*)(s.begins + num_spans(p) + 1);
  s.numbers = (u32*)(s.cuts + p.work_blocks + 1);
  return s;
}
DEVICE Cut load_cut(const Scratch& s, int block) {
  const u32x2 v = ld_global_u32x2(s.cuts + block);
  return {(i32)v.x, (i32)v.y};
}
DEVICE bool is_before(const Cut& a, const Cut& b) { return a.span < b.span || (a.span == b.span && a.tile < b.tile); }

// The first index in [0, n) for which `holds`, which holds for all after it; n if there is none.
template <class Predicate>
DEVICE int first_that(int n, const Predicate& holds) {
  int lo = 0, hi = n;
  while (lo < hi) {
    const int mid = (lo + hi) >> 1;
    if (holds(mid))
      hi = mid;
    else
      lo = mid + 1;
  }
  return lo;
}

// --- scan ----------------------------------------------------------------------------------------------------------

// Sum of the values of the threads before this one, and of all threads.
struct Prefix {
  u64 before, total;
};
DEVICE Prefix block_scan(u64 value, u32 smem) {
  const int lane = thread_idx() % WARP, warp = thread_idx() / WARP;
  u64 sum = value;
#pragma unroll
  for (int distance = 1; distance < WARP; distance *= 2) {
    const u64 other = shfl_u64(sum, max_int(lane - distance, 0));
    if (lane >= distance) sum += other;
  }
  block_sync();  // orders the reads of the sums of the scan before this one before the writes below
  if (lane == WARP - 1) st_shared_u32x2(smem + Smem::SUMS + warp * 8, {(u32)sum, (u32)(sum >> 32)});
  block_sync();  // orders the writes of the warps' sums before every thread's reads of them
  Prefix r = {sum - value, 0};
#pragma unroll
  for (int w = 0; w < WARPS; w++) {
    const u32x2 v = ld_shared_u32x2(smem + Smem::SUMS + w * 8);
    const u64 other = (u64)v.y << 32 | v.x;
    if (w < warp) r.before += other;
    r.total += other;
  }
  return r;
}

// --- steps ---------------------------------------------------------------------------------------------------------

// Lays the spans that exist on the axis. Returns how many there are.
DEVICE int place_spans(const VerifyParams& p, const Scratch& s, u32 smem) {
  constexpr int COST_BITS = 44;  // of a pair of sums: costs below, spans above
  constexpr u64 COST = ((u64)1 << COST_BITS) - 1;
  const int n = num_spans(p);
  u64 placed = 0;
  for (int base = 0; base < n; base += THREADS) {
    const int number = base + thread_idx();
    const int cost = number < n ? load_span(p, number).cost : 0;
    const Prefix prefix = block_scan(cost ? (u64)1 << COST_BITS | (u64)cost : 0, smem);
    const u64 before = placed + prefix.before;
    if (cost) {
      const int span = (int)(before >> COST_BITS);
      st_global_u64(s.begins + span, before & COST);
      st_global_u32(s.numbers + span, number);
    }
    placed += prefix.total;
  }
  const int spans = (int)(placed >> COST_BITS);
  if (thread_idx() == 0) st_global_u64(s.begins + spans, placed & COST);
  block_sync();  // orders the writes of the axis before every thread's reads of it
  return spans;
}

DEVICE int tiles_of(const VerifyParams& p, const Scratch& s, int span) {
  const u64 cost = ld_global_u64(s.begins + span + 1) - ld_global_u64(s.begins + span);
  return max_int((int)cost - p.work_start_tiles, 0);
}

// Least value of all threads.
DEVICE int block_min(int value, u32 smem) {
#pragma unroll
  for (int distance = WARP / 2; distance; distance /= 2) value = min_int(value, (i32)shfl_xor_u32(value, distance));
  block_sync();  // orders the reads of the last scan before the writes below
  if (thread_idx() % WARP == 0) st_shared_u32(smem + Smem::SUMS + thread_idx() / WARP * 8, (u32)value);
  block_sync();  // orders the writes of the warps' values before every thread's reads of them
#pragma unroll
  for (int w = 0; w < WARPS; w++) value = min_int(value, (i32)ld_shared_u32(smem + Smem::SUMS + w * 8));
  return value;
}

// Where block `block` begins, if all take equal pieces of the axis.
DEVICE Cut equal_cut(const VerifyParams& p, const Scratch& s, int spans, int block) {
  const u64 end = ld_global_u64(s.begins + spans);
  u64 active = end / (u32)p.work_least_tiles;
  active = active<1 ? 1 : active>(u32) p.work_blocks ? (u64)p.work_blocks : active;
  if ((u32)block >= active) return {spans, 0};
  const u64 at = (u64)block * end / active;
  const int span = first_that(spans, [&](int i) { return ld_global_u64(s.begins + i + 1) > at; });
  if (span == spans) return {spans, 0};
  const int tiles = tiles_of(p, s, span);
  const int tile = (int)(at - ld_global_u64(s.begins + span)) - p.work_start_tiles;
  const int least = max_int(p.work_start_tiles / 4, 1);  // more would leave others longer than a start that it saves
  if (tile < least) return {span, 0};
  return tiles - tile < least ? Cut{span + 1, 0} : Cut{span, tile};
}

// Most tiles of a run, if each block takes a run of one row tile; 0 where equal pieces of the axis end sooner.
DEVICE int find_run(const VerifyParams& p, const Scratch& s, int spans, u32 smem) {
  constexpr int NONE = 0x7fffffff;
  if (spans == 0 || spans > p.work_blocks) return 0;
  const u64 end = ld_global_u64(s.begins + spans), blocks = (u32)p.work_blocks;
  if (end > NONE) return 0;  // sums of tiles do not fit an int
  const int piece = (int)((end + blocks - 1) / blocks);
  const int tiles = (int)(end - (u32)(spans * p.work_start_tiles));  // a few too few where some have none
  const int least = max_int(max_int((tiles + (int)blocks - 1) / (int)blocks, p.work_least_tiles), 1);
  // Every thread tries another one: all lengths, or 512 of them within a quarter of the shortest.
  const int run = least + thread_idx() * max_int(least >> 11, 1);
  int runs = 0;
  bool is_cut = false;
  for (int i = 0; i < spans; i++) {
    const int span_tiles = tiles_of(p, s, i);
    runs += max_int((span_tiles + run - 1) / run, 1);
    is_cut |= span_tiles > run;
  }
  // Nothing to merge is worth a start; equal pieces of the axis, whose blocks may start twice, a little.
  const int allowed = max_int(piece + piece / 64 + (is_cut ? 0 : p.work_start_tiles), p.work_least_tiles);
  const int best = block_min(runs <= p.work_blocks && run <= allowed ? run : NONE, smem);
  return best == NONE ? 0 : best;
}

// Block of the first run of each span, and the runs of the span after it.
DEVICE void cut_runs(const VerifyParams& p, const Scratch& s, int spans, int run, u32 smem) {
  int placed = 0;
  for (int base = 0; base < spans; base += THREADS) {
    const int span = base + thread_idx();
    const int tiles = span < spans ? tiles_of(p, s, span) : 0;
    const int runs = span < spans ? max_int((tiles + run - 1) / run, 1) : 0;
    const Prefix prefix = block_scan(runs, smem);
    for (int i = 0; i < runs; i++)
      st_global_u32x2(s.cuts + placed + (int)prefix.before + i, {(u32)span, (u32)((u64)i * tiles / runs)});
    placed += (int)prefix.total;
  }
  for (int block = placed + thread_idx(); block <= p.work_blocks; block += THREADS)
    st_global_u32x2(s.cuts + block, {(u32)spans, 0});
}

// Each block takes equally many row tiles, of which there are more than blocks, if that is no more than a start beside
// an equal piece of the axis: so much do cuts cost.
DEVICE bool deal_whole(const VerifyParams& p, const Scratch& s, int spans, u32 smem) {
  const u64 end = ld_global_u64(s.begins + spans), blocks = (u32)p.work_blocks;
  if (spans <= p.work_blocks || end < blocks * (u32)p.work_least_tiles || end > 0x7fffffff) return false;
  const auto first_span = [&](int block) { return (int)((u64)block * (u32)spans / blocks); };
  int longest = 0;
  for (int block = thread_idx(); block < p.work_blocks; block += THREADS) {
    const u64 load = ld_global_u64(s.begins + first_span(block + 1)) - ld_global_u64(s.begins + first_span(block));
    longest = max_int(longest, (int)load);
  }
  if (-block_min(-longest, smem) > (int)((end + blocks - 1) / blocks) + p.work_start_tiles) return false;
  for (int block = thread_idx(); block <= p.work_blocks; block += THREADS)
    st_global_u32x2(s.cuts + block, {(u32)first_span(block), 0});
  return true;
}

DEVICE void find_cuts(const VerifyParams& p, const Scratch& s, int spans, u32 smem) {
  const int run = find_run(p, s, spans, smem);
  if (run) {
    cut_runs(p, s, spans, run, smem);
  } else if (!deal_whole(p, s, spans, smem)) {
    for (int block = thread_idx(); block <= p.work_blocks; block += THREADS) {
      const Cut cut = block < p.work_blocks ? equal_cut(p, s, spans, block) : Cut{spans, 0};
      st_global_u32x2(s.cuts + block, {(u32)cut.span, (u32)cut.tile});
    }
  }
  block_sync();  // orders the writes of the cuts before every thread's reads of them
}

// The block whose piece holds a tile of a span.
DEVICE int block_of(const VerifyParams& p, const Scratch& s, const Cut& at) {
  return first_that(p.work_blocks, [&](int k) { return is_before(at, load_cut(s, k + 1)); });
}

// The items of block `block`: the first lies at its index, the others from `others` on.
DEVICE void write_items(const VerifyParams& p, const Scratch& s, int block, int others) {
  const Cut begin = load_cut(s, block), end = load_cut(s, block + 1);
  const int items = end.span - begin.span + (end.tile > 0);
  if (items <= 0) store_work_item(p, block, {-1, 0, {0, 0}, 0, 0, 0, 0, 0, -1, -1});
  for (int i = 0; i < items; i++) {
    const int span = begin.span + i;
    const Span v = load_span(p, ld_global_u32(s.numbers + span));
    const TileRange tiles = {i == 0 ? begin.tile : 0, span == end.span ? end.tile : v.tiles};
    const bool whole = tiles.begin == 0 && tiles.end == v.tiles;
    const int part = whole ? -1 : 2 * block + (tiles.begin == 0);
    const int next = i + 1 < items ? others + i : -1;
    store_work_item(p, i == 0 ? block : others + i - 1,
                    {v.request.index, v.index, tiles, v.request.q_begin, v.request.q_len, v.request.kv_len,
                     v.request.tail_len, v.request.id_begin, part, next});
  }
}

// Behind the merges of the blocks, where the query tokens end that belong to a request.
DEVICE void write_end(const VerifyParams& p) {
  const int end = p.qo_indptr ? (i32)ld_global_u32(p.qo_indptr + p.batch) : p.batch * p.max_q_len;
  store_work_merge(p, p.work_blocks, {-1, -1, end, 0, 0});
}

DEVICE void write_merge(const VerifyParams& p, const Scratch& s, int block) {
  const Cut begin = load_cut(s, block);
  WorkMerge merge = {-1, -1, 0, 0, 0};
  if (begin.tile > 0 && is_before(begin, load_cut(s, block + 1))) {
    const Span v = load_span(p, ld_global_u32(s.numbers + begin.span));
    merge = {block_of(p, s, {begin.span, 0}), block_of(p, s, {begin.span, v.tiles - 1}), v.request.q_begin,
             v.rows.first, v.rows.end};
  }
  store_work_merge(p, block, merge);
}

KERNEL(mlaflash_plan, THREADS, 1) {
  const u32 smem = shared_base();
  const Scratch s = scratch(p);
  const int spans = place_spans(p, s, smem);
  find_cuts(p, s, spans, smem);
  if (thread_idx() == 0) write_end(p);
  u64 placed = p.work_blocks;
  for (int base = 0; base < p.work_blocks; base += THREADS) {
    const int block = base + thread_idx();
    int others = 0;
    if (block < p.work_blocks) {
      const Cut begin = load_cut(s, block), end = load_cut(s, block + 1);
      others = max_int(end.span - begin.span + (end.tile > 0) - 1, 0);
    }
    const Prefix prefix = block_scan(others, smem);
    if (block < p.work_blocks) {
      write_items(p, s, block, (int)(placed + prefix.before));
      write_merge(p, s, block);
    }
    placed += prefix.total;
  }
}

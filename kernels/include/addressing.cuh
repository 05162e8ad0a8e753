// Which request a query token belongs to, what it may see, and where the rows of its KV live.
#pragma once
#include "elements.cuh"

struct Request {
  int index;     // -1: the token is padding behind the last request
  int q_begin;   // first query token
  int q_len;     // query tokens
  int kv_len;    // KV tokens, the q_len new ones included
  int tail_len;  // last KV tokens that the tree mask describes
  i64 id_begin;  // first entry of this request in page_ids
};

struct KvRow {
  const u8* c;   // 512 latent elements; null: the token is not visible and must not be read
  const u8* pe;  // 64 rope elements
};

DEVICE i64 load_id(const void* ids, bool wide, i64 index) {
  return wide ? (i64)ld_global_u64((const u64*)ids + index) : (i64)(i32)ld_global_u32((const u32*)ids + index);
}

// All loads come before the first use of one: every block starts with this, and waits for memory once. Where an array
// is missing, the address of another one is read in its place, because a branch would end the run of loads.
DEVICE Request load_request(const VerifyParams& p, int index) {
  if constexpr (SPARSE_IDS) {
    const i32 kv_len = p.kv_lens ? (i32)ld_global_u32(p.kv_lens + index) : (i32)p.max_kv_len;
    return {index, index, 1, kv_len, 0, index * p.block_table_stride};
  }
  const u32* kv_lens = (const u32*)p.kv_lens + index;
  const u32* qo_indptr = p.qo_indptr ? (const u32*)p.qo_indptr + index : kv_lens;
  const u32* tail_lens = p.tail_lens ? (const u32*)p.tail_lens + index : kv_lens;
  const u32* kv_indptr = p.kv_indptr ? (const u32*)p.kv_indptr + ((i64)index << p.wide_indptr) : kv_lens;
  const i32 kv_len = (i32)ld_global_early_u32(kv_lens);
  const i32 q_begin = (i32)ld_global_early_u32(qo_indptr),
            q_end = (i32)ld_global_early_u32(p.qo_indptr ? qo_indptr + 1 : qo_indptr);
  const i32 tail_len = (i32)ld_global_early_u32(tail_lens);
  const u32 id_begin = ld_global_early_u32(kv_indptr),
            id_begin_high = ld_global_early_u32(p.wide_indptr ? kv_indptr + 1 : kv_indptr);
  Request r;
  r.index = index;
  r.id_begin = p.wide_indptr ? (i64)((u64)id_begin_high << 32 | id_begin) : (i64)(i32)id_begin;
  if (!p.kv_indptr) r.id_begin = index * p.block_table_stride;
  r.q_begin = p.qo_indptr ? q_begin : index * p.max_q_len;
  r.q_len = p.qo_indptr ? q_end - q_begin : p.max_q_len;
  // None of these is negative. The question keeps their loads from sinking below the branches that q_len decides.
  if ((r.id_begin | kv_len | tail_len) < 0) r.q_len = 0;
  r.kv_len = kv_len;
  r.tail_len = p.tail_lens ? tail_len : r.q_len;
  return r;
}

// The last request that starts at or before `token`: requests without query tokens are passed over.
DEVICE Request find_request(const VerifyParams& p, int token) {
  if (!p.qo_indptr) return load_request(p, token / p.max_q_len);
  if (token >= (i32)ld_global_u32(p.qo_indptr + p.batch)) return Request{-1, 0, 0, 0, 0, 0};
  int lo = 0, hi = p.batch - 1;
  while (lo < hi) {
    const int mid = (lo + hi + 1) >> 1;
    if ((i32)ld_global_u32(p.qo_indptr + mid) <= token)
      lo = mid;
    else
      hi = mid - 1;
  }
  return load_request(p, lo);
}

// KV tokens at or past this index are invisible to query token `q` (an absolute index) of the request.
DEVICE int visible_end(const VerifyParams& p, const Request& r, int q) {
  if (p.mask_mode != MASK_CAUSAL) return r.kv_len;
  const int end = r.kv_len - r.q_len + (q - r.q_begin) + 1;  // bottom-right aligned
  return end > 0 ? end : 0;
}

// Only for kv below visible_end().
DEVICE bool is_visible(const VerifyParams& p, const Request& r, int q, int kv) {
  if constexpr (SPARSE_IDS) return load_id(p.page_ids, p.wide_ids, r.id_begin + kv) >= 0;
  if (p.mask_mode != MASK_TREE) return true;
  const int column = kv - (r.kv_len - r.tail_len);
  if (column < 0) return true;
  const u32 word = ld_global_u32(p.mask_words + (i64)q * p.mask_words_per_row + (column >> 5));
  return (word >> (column & 31)) & 1;
}

DEVICE u32 page_of(const VerifyParams& p, u32 token, u32 magic) {
  if constexpr (SPARSE_IDS) return token;
  return (magic ? mul_hi_u32(token, magic) : token) >> p.page_shift;
}
DEVICE u32 page_of(const VerifyParams& p, u32 token) { return page_of(p, token, p.page_magic); }

DEVICE KvRow kv_row(const VerifyParams& p, const Request& r, int token) {
  const int new_token = token - (r.kv_len - r.q_len);
  if (p.new_kv_c && new_token >= 0) {
    const i64 row = r.q_begin + new_token;
    return {element_ptr<KV_DTYPE>(p.new_kv_c, row * p.new_kv_c_stride),
            element_ptr<KV_DTYPE>(p.new_k_pe, row * p.new_k_pe_stride)};
  }
  const u32 page = page_of(p, token);
  const i64 slot = token - (i64)page * p.page_size;
  const i64 id = load_id(p.page_ids, p.wide_ids, r.id_begin + page);
  return {element_ptr<KV_DTYPE>(p.kv_c, id * p.kv_c_stride_page + slot * p.kv_c_stride_token),
          element_ptr<KV_DTYPE>(p.k_pe, id * p.k_pe_stride_page + slot * p.k_pe_stride_token)};
}

// The 16-byte unit `unit` of a row of 576 elements that lies in two pieces.
template <int DTYPE>
DEVICE const u8* row_unit(const u8* c, const u8* pe, int unit) {
  constexpr int UNITS_C = DL / vector_width<DTYPE>();
  return unit < UNITS_C ? c + unit * 16 : pe + (unit - UNITS_C) * 16;
}

DEVICE const u8* q_nope_row(const VerifyParams& p, int token, int head) {
  return element_ptr<Q_DTYPE>(p.q_nope, token * p.q_nope_stride_t + head * p.q_nope_stride_h);
}
DEVICE const u8* q_pe_row(const VerifyParams& p, int token, int head) {
  return element_ptr<Q_DTYPE>(p.q_pe, token * p.q_pe_stride_t + head * p.q_pe_stride_h);
}

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;

// The lse that a call asks for, of one in base 2.
DEVICE float lse_out(const VerifyParams& p, float lse) { return p.lse_base_2 ? lse : lse * LN_2; }

// 2^x of an integer x <= 0, exactly; 0 for what float32 holds only as a subnormal, and for -inf.
DEVICE float exact_ex2(float x) { return x < -126.0f ? 0.0f : as_f32((u32)((int)x + 127) << 23); }

// Scaled, soft-capped score in base 2.
DEVICE float score_log2(const VerifyParams& p, float dot) {
  float s = dot * p.sm_scale;
  if (p.logit_cap > 0.0f) s = p.logit_cap * tanh_f32(s / p.logit_cap);
  return s * LOG2_E;
}

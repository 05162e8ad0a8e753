"""Decode with a small MLA transformer: plainly, with chains of drafts, and with trees of them; the tokens are the same.

On the GPU where there is one, else on the emulator. The model has random weights that never change, RoPE with YaRN,
absorbed projections and a paged cache; the drafter errs now and then. Accepted paths are moved to the front of their
slots in every step, and requests are defragmented every few. Run it with: python examples/speculative_decode.py
"""

from mlaflash.device import gpu_available
from mlaflash.lab.token_exact import check_tokens, settings_for

place, config, requests, count, defrag_steps = settings_for("gpu" if gpu_available() else "emulator")
print(f"{requests} requests of {count} tokens on the {place.name}: {config.dtype}, {config.layers} layers")
for found in check_tokens(place, config, requests=requests, count=count, defrag_steps=defrag_steps):
    same = requests - len(found.divergences)
    faster = f", {found.plain_seconds / found.seconds:.2f}x as fast" if place.is_timed else ""
    print(
        f"{found.decoding}: {found.accepted:.2f} tokens a step, {found.plain_steps / found.steps:.2f}x fewer steps"
        f"{faster}, {same} of {requests} sequences as in plain decoding"
    )
    if found.failure:
        raise SystemExit(found.failure)

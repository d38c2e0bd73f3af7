"""Run by test_determinism.py on the cores that it chose: prints their number and digests of results, one per
storage, schedule and dtype.
"""

from __future__ import annotations

import hashlib
import os

import ml_dtypes
import numpy as np
from batches import ENGINE, random_requests, run, store

from jaxinfer import Variant

print(len(os.sched_getaffinity(0)))
requests = random_requests([1, 1, 40, 3], [900, 2500, 300, 17], 4, 2, 32)
for way in ENGINE[:2]:
    for schedule in ("lpt", "runs"):
        for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
            stored = store(way, *requests, page_size=16, num_tokens=48, dtype=dtype)
            state = run(way, stored, variant=Variant(causal=True), schedule=schedule)
            print(hashlib.sha256(state.o.tobytes() + state.lse.tobytes()).hexdigest())

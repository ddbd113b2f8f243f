"""stub"""

import json
import sys
from pathlib import Path

from bert_dp.config import load_config
from bert_dp.cost import GIB, memory_estimate_gib

c = load_config(Path(sys.argv[1]))
R = int(sys.argv[2])
b = [int(x) for x in sys.argv[3:]]
P = [
    memory_estimate_gib(
        c.model_copy(update={"batch": c.batch.model_copy(update={"micro_size": x})}), "fp32", R
    )
    for x in b
]
parts = {}
for k in P[0]:
    s = (P[1][k] - P[0][k]) * GIB / (b[1] - b[0])
    parts[k] = [P[0][k] * GIB - s * b[0], s]
print(
    json.dumps(
        {
            "source": "formula",
            "why": "stub",
            "precision": "fp32",
            "ranks": R,
            "sizes": b,
            "peak_bytes": [sum(p.values()) * GIB for p in P],
            "intercept_bytes": sum(v[0] for v in parts.values()),
            "bytes_per_sequence": sum(v[1] for v in parts.values()),
            "parts": parts,
        }
    )
)

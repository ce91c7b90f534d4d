#!/usr/bin/env bash
# A 2 x 2 x 2 sweep on a CPU, five repeats of each cell. Run from the root of the checkout, on a quiet machine; what is there
# already is kept, so delete outputs/example_sweep first for fresh numbers.
set -euo pipefail
cd "$(dirname "$0")/../.."
exec "${PYTHON:-python}" -m core.run -m task=bench model=smollm2 device=cpu \
  scheduler=fcfs,mixed kv_allocator=block_hash,paged overlap=0,1 \
  load=shared_prefix load.arrival=poisson load.rate=8 load.num_requests=10 load.shared=192 \
  load.input_min=16 load.input_max=64 load.output_min=8 load.output_max=16 \
  sampling.temperature=0 max_model_len=320 bench.repeats=1 bench.records=false \
  sweep.repeats=5 sweep.timeout_s=300 hydra.sweep.dir=outputs/example_sweep "$@"

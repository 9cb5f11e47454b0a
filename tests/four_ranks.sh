# Functions for scripts of tests that source this with $binary and $repository set: a run of 10 steps of 8 sequences, and a comparison of
# two runs.

# four_ranks_run FOLDER WORDS...: WORDS start the program.
four_ranks_run() {
  local folder=$1
  shift
  "$@" train "$repository/configs/shakespeare-char.json" --set "data.path=$repository/LICENSE" --set "logging.dir=$folder" --set logging.interval=1 \
    --set training.steps=10 --set training.micro_batch_size=2 --set training.grad_accum=null --set training.global_batch_size=8 \
    --set training.accumulation=tree --set training.threads=1 --set eval.samples=null --set eval.iters=2 --set eval.interval=5
}

# Losses, norms and validation losses of a run, to the last digit.
course() {
  python3 - "$1" <<'END'
import json, sys
for event in map(json.loads, open(sys.argv[1] + "/metrics.jsonl")):
    if event["type"] in ("step", "eval"):
        print(event["type"], event["step"], event["loss"], event.get("grad_norm"))
END
}

# require_same_run A B: B ran on four ranks.
require_same_run() {
  diff <(course "$1") <(course "$2")
  local lines
  lines=$(course "$2" | wc -l)
  [ "$lines" = 12 ] || { echo "10 steps and 2 evaluations were expected, not $lines"; exit 1; }
  "$binary" inspect "$1/checkpoints" --diff "$2/checkpoints"
  ls "$2/checkpoints/step-00000010/shard-00003.safetensors"
}

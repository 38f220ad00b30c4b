#!/usr/bin/env bash
# The GPU table: Slipstream and vLLM, the same loads one after the other on this machine. One JSON a model.
#   benchmarks/gpu.sh MODEL [MODEL ...]     folders with a config.json; weights are random
# Environment:
#   BENCH    the script that runs either engine (--engine, --model, --loads; prints RESULT and a JSON object
#            for each load); default .peer/bench.py
#   PEER     folders to put before PYTHONPATH for vLLM; default $HOME/peer/site:$HOME/peer/deps. Without vLLM
#            there and among the installed packages, ours runs alone
#   LOADS    default: all of the table
#   VARIANTS ours once more with each of: flash (--attention-backend flash), invariant (--batch-invariant),
#            compiled (--compilation-config stock_torch_compile); default none
#   RESULTS  where the JSON files go; default benchmarks/results
#   PYTHON   default python3
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
[[ $# -gt 0 ]] || { sed -n 's/^# \{0,1\}//; 2,13p' "$0" >&2; exit 2; }
bench=${BENCH:-$root/.peer/bench.py}
ours=$root${PYTHONPATH:+:$PYTHONPATH}
peer=${PEER:-$HOME/peer/site:$HOME/peer/deps}
loads=${LOADS:-bs1,bs8,bs64,bs256,bs256-sampled,nano,prefill,long}
results=${RESULTS:-$root/benchmarks/results}
python=${PYTHON:-python3}
[[ -f $bench ]] || { echo "BENCH=$bench: no such file" >&2; exit 2; }
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_USE_FLASHINFER_SAMPLER=0
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir -p "$results"

# run ENGINE PYTHONPATH MODEL LOADS LOG [more]: shows the results, or the end of the log and fails.
run() {
    echo "== $1 $(basename "$3"): $4" >&2
    if ! PYTHONPATH=$2 PYTHONUNBUFFERED=1 "$python" "$bench" --engine "$1" --model "$3" --loads "$4" "${@:6}" \
        > "$5" 2>&1; then
        tail -n 40 "$5" >&2
        return 1
    fi
    grep '^RESULT' "$5" >&2
}

declare -A variants=(
    [flash]='{"attention_backend": "flash", "block_size": 128}'
    [invariant]='{"batch_invariant": true}'
    [compiled]='{"compilation_config": {"mode": "stock_torch_compile"}}'
)
for variant in ${VARIANTS:-}; do
    [[ -n ${variants[$variant]:-} ]] || { echo "VARIANTS=$variant: must be of ${!variants[*]}" >&2; exit 2; }
done

has_peer() { PYTHONPATH=$peer "$python" -c 'import importlib.util as u; exit(u.find_spec("vllm") is None)'; }

for model in "$@"; do
    name=$(basename "$model")
    logs=(--first "$scratch/first" --ours "$scratch/ours")
    cache=empty
    [[ -z $(ls -A "${TRITON_CACHE_DIR:-$HOME/.cache/slipstream/triton}" 2>/dev/null) ]] || cache=filled
    # Twice: what the first start compiles, the second finds.
    run slipstream "$ours" "$model" bs1 "$scratch/first" || exit 1
    run slipstream "$ours" "$model" "$loads" "$scratch/ours" || exit 1
    for variant in ${VARIANTS:-}; do
        run slipstream "$ours" "$model" "$loads" "$scratch/$variant" --llm "${variants[$variant]}" &&
            logs+=(--variant "$variant=$scratch/$variant")
    done
    if ! has_peer; then
        echo "== no vLLM in $peer: ours alone" >&2
    elif run vllm "$peer" "$model" "$loads" "$scratch/theirs" --runner 1; then
        logs+=(--theirs "$scratch/theirs")
    fi
    command="${VARIANTS:+VARIANTS='$VARIANTS' }${LOADS:+LOADS=$LOADS }benchmarks/gpu.sh $name"
    PYTHONPATH=$root "$python" "$root/benchmarks/gpu_table.py" "$name" "${logs[@]}" --cache "$cache" \
        --command "$command" --json "$results/gpu_$name.json"
done

#!/usr/bin/env bash
# Speculation methods on real prompts that quote their input, one after the other, each in its own process:
#   benchmarks/speculation_gpu.sh MODEL DRAFTERS RESULTS METHOD [METHOD ...]
# MODEL: a Hugging Face folder. DRAFTERS: a folder as examples/train_drafter.py writes it. RESULTS: a file
# that gets a JSON line for each method and concurrency; benchmarks/speculation.py says what is in it. METHOD:
# plain, ngram, suffix, draft_model, eagle, eagle3, medusa, mlp_speculator, vllm-plain or vllm-ngram. Exit
# status 1 where a method failed or ran out of time; the others run all the same. For two GPUs call it twice,
# with CUDA_VISIBLE_DEVICES.
# Environment:
#   CONCURRENCY  default "1 8 64 256"; a concurrency has the same prompts whichever others are named
#   LIMIT        seconds for a method; default 240
#   DRAFTS       num_speculative_tokens of all that have layers; default 3; heads give as many as they are
#   MORE         further flags of speculation.py, such as "--output-len 128"
#   PEER         folders to put before PYTHONPATH for vLLM; default $HOME/peer/site:$HOME/peer/deps
#   PYTHON       default python3
set -uo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
[[ $# -gt 3 ]] || { sed -n 's/^# \{0,1\}//; 2,16p' "$0" >&2; exit 2; }
model=$1 drafters=$2 results=$3
drafts=${DRAFTS:-3}
read -ra concurrency <<< "${CONCURRENCY:-1 8 64 256}"
read -ra more <<< "${MORE:-}"
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_USE_FLASHINFER_SAMPLER=0 PYTHONUNBUFFERED=1
log=$(mktemp)
trap 'rm -f "$log"' EXIT

spec_of() {
    case ${1#vllm-} in
        plain) ;;
        ngram)
            echo '{"method": "ngram", "num_speculative_tokens": 8,' \
                '"prompt_lookup_min": 2, "prompt_lookup_max": 5}'
            ;;
        suffix) echo '{"method": "suffix", "num_speculative_tokens": 16}' ;;
        draft_model | eagle | eagle3)
            echo "{\"method\": \"$1\", \"model\": \"$drafters/$1\", \"num_speculative_tokens\": $drafts}"
            ;;
        medusa | mlp_speculator) echo "{\"method\": \"$1\", \"model\": \"$drafters/$1\"}" ;;
        *) return 1 ;;
    esac
}

failed=0
for method in "${@:4}"; do
    spec=$(spec_of "$method") || { echo "no such method: $method" >&2; failed=1; continue; }
    engine=slipstream path=$root${PYTHONPATH:+:$PYTHONPATH}
    [[ $method != vllm-* ]] || engine=vllm path=${PEER:-$HOME/peer/site:$HOME/peer/deps}
    echo "== $method" >&2
    if PYTHONPATH=$path timeout -k 10 "${LIMIT:-240}" "${PYTHON:-python3}" "$root/benchmarks/speculation.py" \
        --engine "$engine" --model "$model" --spec "$spec" --concurrency "${concurrency[@]}" \
        --json "$results" "${more[@]}" > "$log" 2>&1; then
        grep '^RESULT' "$log" >&2
    else
        echo "== $method failed, status $?" >&2
        tail -n 40 "$log" >&2
        failed=1
    fi
done
exit $failed

#!/usr/bin/env bash
# Run `python -m tests.gpu` on a machine with a GPU and no network, with the kit that `make gpu-kit` makes:
#   bash tests/gpu/offline.sh --total 570                    the checks first, then as many parts as fit
#   bash tests/gpu/offline.sh --total 170 tune timers micro-512 optimizers
# --rehearse means --short. Variables: PYTHON (default: python3); OUT, the folder for record.json, table.txt, raw.tar.gz
# and the profile's trace (default: .gpu/out); SITE, the folder for the kit's packages that python lacks (default: /tmp/site).
set -uo pipefail
began=$(date +%s)
cd "$(dirname "$0")/../.." || exit 1
kit=$PWD/.gpukit python=${PYTHON:-python3} site=${SITE:-/tmp/site}
out=${OUT:-$PWD/.gpu/out}
mkdir -p "$out" "$site" .gpu
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 TOKENIZERS_PARALLELISM=false PIP_ROOT_USER_ACTION=ignore PYTHONUNBUFFERED=1

install() {
  "$python" -m pip install -q --disable-pip-version-check --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" "$@"
}
export PYTHONPATH=$PWD:$site${PYTHONPATH:+:$PYTHONPATH} # instead of an installation, which would need a build backend
"$python" -c 'import pydantic, plotly' 2>/dev/null || install "$kit"/wheels/*.whl || exit 1
case " $* " in *" deepspeed "*) install "$kit"/wheels-deepspeed/*.whl ;; esac
cp -rn "$kit"/bert_dp-*.dist-info "$site"/
[ -d .gpu/shards ] || "$python" -m tarfile -e "$kit/shards.tar.xz" .gpu || exit 1
echo "installed after $(($(date +%s) - began)) s; commit ${BERT_DP_COMMIT:-$(cat "$kit/COMMIT")}"

"$python" -m tests.gpu --began "$began" --data .gpu/shards "${@/#--rehearse/--short}" &
child=$!
trap 'kill -TERM $child' TERM INT HUP
wait $child
code=$?
while kill -0 $child 2>/dev/null; do wait $child; done # a signal ends the first wait early
cp .gpu/record.json .gpu/table.txt "$out"/
tar -C .gpu --exclude=trace.json.gz -czf "$out/raw.tar.gz" raw logs
cp .gpu/raw/profile/trace.json.gz "$out"/ 2>/dev/null
exit $code

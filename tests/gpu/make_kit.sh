#!/usr/bin/env bash
# Make .gpukit/, which tests/gpu/offline.sh needs on a machine with a GPU and no network: make gpu-kit DATA="SOURCE..."
# SOURCE: files or directories of text, as for `bert-dp data build`. The wheels are for a CPython 3.12 on x86-64 Linux
# that has torch, transformers, pytest and bert-dp's other dependencies. A second call does not repeat finished work.
set -euo pipefail
cd "$(dirname "$0")/../.."
kit=.gpukit bin=.venv/bin
if [ ! -f $kit/shards.tar.xz ] && { [ $# = 0 ] || ! ls -d "$@" >/dev/null 2>&1; }; then
  echo "error: DATA: '$*' does not exist; name text files or directories: make gpu-kit DATA=corpus" >&2
  exit 2
fi
mkdir -p $kit/wheels $kit/wheels-deepspeed
git rev-parse HEAD >$kit/COMMIT
rm -rf $kit/bert_dp-*.dist-info
cp -r .venv/lib/python3*/site-packages/bert_dp-*.dist-info $kit/ # version and entry points

if ! ls $kit/wheels/pydantic_core-*.whl >/dev/null 2>&1; then
  # the versions of the lock file, without its hashes, which belong to another Python version
  lacking='pydantic|pydantic_core|annotated-types|typing-inspection|typing_extensions|plotly'
  $bin/python -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: -d $kit/wheels \
    --python-version 3.12 --implementation cp --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
    --platform manylinux2014_x86_64 --platform any $(grep -oE "^($lacking)==[^ ]+" .ci/all.lock)
fi
if ! ls $kit/wheels-deepspeed/deepspeed-*.whl >/dev/null 2>&1; then # DeepSpeed is published as source only
  DS_BUILD_OPS=0 $bin/python -m pip wheel -q --disable-pip-version-check --no-deps --no-build-isolation \
    -w $kit/wheels-deepspeed hjson "$(grep '^deepspeed==' .constraints.txt)" || echo "no DeepSpeed wheel"
fi
if [ ! -f $kit/shards.tar.xz ]; then
  rm -rf $kit/shards
  $bin/bert-dp data build "$@" --out $kit/shards --vocab-size 32768 data.build.max_tokens_per_char=0.35
  tar -C $kit -cJf $kit/part.tar.xz shards
  mv $kit/part.tar.xz $kit/shards.tar.xz
  rm -r $kit/shards
fi
du -sh $kit

#!/usr/bin/env bash
# Fetches what a build can use and no distribution has into .deps/, which may be copied to machines without a network:
# the headers of NVIDIA's cudnn-frontend, for attention by cuDNN on GPUs. Nothing needs them: where pip or the network is
# missing this says so and ends well.
# usage: launch/deps.sh
set -euo pipefail
cd "$(dirname "$0")/.."

version=1.32.0
folder=.deps/cudnn-frontend
[[ ! -e $folder/include/cudnn_frontend.h ]] || exit 0

skip() {
  echo "launch/deps.sh: $1; attention on GPUs will be built without cuDNN"
  exit 0
}
python3 -m pip --version > /dev/null 2>&1 || skip "there is no pip"
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --retries 1 --timeout 15 \
  --dest "$room" "nvidia-cudnn-frontend==$version" > /dev/null 2>&1 || skip "pip cannot get nvidia-cudnn-frontend $version"
python3 -m zipfile -e "$room"/*.whl "$room/wheel"
mkdir -p "$folder"
mv "$room/wheel/include" "$folder/"
echo "cudnn-frontend $version: $folder"

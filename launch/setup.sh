#!/usr/bin/env bash
# Installs what the build needs and what is missing, with apt: Debian 12 or Ubuntu 24.04, as root or with sudo.
# usage: launch/setup.sh [build] [test] [all] [quickstart]      groups of packages; default: build
set -euo pipefail

declare -A packages=(
  [build]="g++ cmake ninja-build pkg-config git libopenblas-openmp-dev libhdf5-dev libopenmpi-dev openmpi-bin
           libyaml-cpp-dev nlohmann-json3-dev libcli11-dev libfmt-dev libspdlog-dev libsentencepiece-dev
           libpcre2-dev libutf8proc-dev libbenchmark-dev zlib1g-dev"
  [test]="libgtest-dev clang-format iproute2 util-linux hostname"
  [all]="clang clang-tidy libclang-rt-dev libomp-dev"
  [quickstart]="bible-kjv gzip"
)

wanted=()
for group in "${@:-build}"; do
  [[ -v packages[$group] ]] || { echo "launch/setup.sh: no group '$group'; known: ${!packages[*]}" >&2; exit 2; }
  # shellcheck disable=SC2206
  wanted+=(${packages[$group]})
done

missing=()
for package in "${wanted[@]}"; do
  status=$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null || true)
  [[ $status == installed ]] || missing+=("$package")
done
if ((${#missing[@]} == 0)); then
  exit 0
fi

as_root=()
if [[ $(id -u) -ne 0 ]]; then
  command -v sudo > /dev/null || { echo "launch/setup.sh: missing ${missing[*]}; install them, or run as root" >&2; exit 2; }
  as_root=(sudo)
fi
echo "installing ${missing[*]}"
"${as_root[@]}" apt-get update -qq
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" > /dev/null

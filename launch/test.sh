#!/usr/bin/env bash
# Installs what is missing, builds, and runs every test.
# usage: launch/test.sh          at most 25 minutes on 2 cores
#        launch/test.sh --all    also sanitizers, clang-tidy and fuzzing: at most 65 minutes
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/phases.sh

all=false
case "${1:-}" in
  "") ;;
  --all) all=true ;;
  *) echo "launch/test.sh: unknown argument '$1'; the only one is --all" >&2; exit 2 ;;
esac

jobs=$(nproc)

# configure FOLDER OPTIONS...
configure() {
  local folder=$1
  shift
  cmake -S . -B "$folder" -G Ninja "$@" > /dev/null
}

build() {
  configure build
  ninja -C build
}

check_format() {
  local version
  version=$(clang-format --version | sed 's/.*version \([0-9]*\).*/\1/')
  if [[ $version != 14 ]]; then
    echo "SKIPPED: the format is checked with clang-format 14, this is $version"
    return
  fi
  git ls-files '*.h' '*.cpp' '*.cu' '*.cuh' | xargs -r clang-format --dry-run --Werror
}

run_tests() { ctest --test-dir build --output-on-failure --no-tests=error -j "$jobs"; }

# Sanitizers cost a factor of about ten: the tests run at reduced sizes there (PALIMPSEST_REDUCED).
run_sanitized() {
  configure build-sanitize -DWITH_CUDA=OFF -DSANITIZE=address,undefined
  ninja -C build-sanitize
  PALIMPSEST_REDUCED=1 ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
    ctest --test-dir build-sanitize --output-on-failure --no-tests=error -j "$jobs" -LE 'unsanitized|mpi_program'
}

# What has threads of its own: the loader, background saves, watchdogs.
run_thread_sanitized() {
  configure build-thread -DWITH_CUDA=OFF -DSANITIZE=thread
  ninja -C build-thread data_test parallel_test trainer_test
  PALIMPSEST_REDUCED=1 OMP_NUM_THREADS=1 TSAN_OPTIONS=halt_on_error=1 \
    ctest --test-dir build-thread --output-on-failure --no-tests=error -j "$jobs" -R 'Loader|Background|Watchdog|Thread'
}

# Of what this build compiles: the rest may ask for headers that are not here.
run_clang_tidy() {
  git ls-files '*.cpp' ':!tests' | while read -r file; do
    if grep -qF "\"file\": \"$PWD/$file\"" build/compile_commands.json; then echo "$file"; fi
  done | xargs -r -n 1 -P "$jobs" clang-tidy -p build --quiet 2> /dev/null
}

run_fuzzers() {
  configure build-fuzz -DWITH_CUDA=OFF -DFUZZ=ON -DBUILD_TESTING=OFF -DCMAKE_C_COMPILER=clang -DCMAKE_CXX_COMPILER=clang++
  ninja -C build-fuzz fuzzers
  tests/fuzz/run.sh build-fuzz
}

phase "install packages" launch/setup.sh build test
if command -v nvcc > /dev/null || [[ -x /usr/local/cuda/bin/nvcc ]]; then phase "fetch headers for cuDNN" launch/deps.sh; fi
phase "check the format" check_format
phase "build" build
if $all; then
  phase "install packages for --all" launch/setup.sh all
  phase "clang-tidy" run_clang_tidy
  phase "address and undefined-behaviour sanitizers" run_sanitized
  phase "thread sanitizer" run_thread_sanitized
  phase "fuzzing" run_fuzzers
fi
# Last, so that the summary of the tests ends the output.
phase "tests" run_tests
print_phases

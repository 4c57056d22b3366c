#!/bin/sh
# Builds the fuzz target with the sanitizers given: build.sh OUTPUT FLAGS...
set -eu
here=$(dirname "$0")
native=$here/../../src/firstlight/ops/cpu/native
out=$1
shift
flags="-std=c++17 -O1 -g -ffp-contract=off -Wall -Wextra -Wno-psabi -pthread -I$native $*"
avx2="-mavx2 -mfma -mf16c"
avx512="$avx2 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni"
mkdir -p "$(dirname "$out")"
kernels() { ${CXX:-g++} $flags $2 -DFL_KERNELS="fl_$1" -c "$native/kernels.cpp" -o "$out.$1.o"; }
kernels portable ""
if [ "$(uname -m)" = x86_64 ]; then
    kernels avx2 "$avx2"
    kernels avx512 "$avx512"
fi
${CXX:-g++} $flags "$here/fuzz.cpp" "$native/pool.cpp" "$out".*.o -o "$out"
${CXX:-g++} $flags "$here/exchange.cpp" "$native/exchange.cpp" -o "$out-exchange"
rm -f "$out".*.o

#!/bin/sh
# The first minutes on a machine with a GPU, with programs that were built elsewhere: does it run at all, do streams wait for each other, how
# does a job end whose rank is lost. `./dev gpu carried` starts it; every part has its own time, and its output goes to $OUT as it comes.
set -u
cd "$(dirname "$0")/../.."
out=${OUT:-build/gpu/carried}
mkdir -p "$out"
out=$(cd "$out" && pwd)
bin=$PWD/.gpu/bin
python=${PYTHON:-python3}
failed=0
export OMP_NUM_THREADS=1 NCCL_DEBUG=WARN

say() { printf '%s\n' "$*" | tee -a "$out/summary.txt"; }

# part SECONDS NAME COMMAND...: its output into NAME.log, one line of how it ended.
part() {
  seconds=$1 name=$2
  shift 2
  began=$(date +%s)
  timeout -k 5 "$seconds" "$@" >"$out/$name.log" 2>&1
  code=$?
  case $code in
    0) how="well" ;;
    77) how="skipped: $(sed -n 's/^skipped: //p' "$out/$name.log" | head -n 1)" ;;
    124 | 137) how="not: it was still running after $seconds s" ;;
    *) how="with $code: $(tail -n 1 "$out/$name.log")" ;;
  esac
  say "$name: $(($(date +%s) - began)) s, ended $how"
  [ $code -eq 0 ] || [ $code -eq 77 ] || failed=1
  # A kernel that is loaded while others wait for each other waits for them: if eager loading helps, that was it.
  if [ $code -ne 0 ] && [ $code -ne 77 ] && [ "${CUDA_MODULE_LOADING:-}" != EAGER ]; then
    first=$code
    CUDA_MODULE_LOADING=EAGER part "$seconds" "$name-eager" "$@"
    return $first
  fi
  return $code
}

# Where torch lies, as users of LibTorch know it, so are CUDA's and NCCL's libraries.
site=$("$python" -c 'import importlib.util as u, os; print(os.path.dirname(u.find_spec("torch").submodule_search_locations[0]))') || {
  say "no torch for $python. Remedy: PYTHON=<one that can import torch>"
  exit 2
}
export LD_LIBRARY_PATH="$site/torch/lib:$site/nvidia/cu13/lib:$site/nvidia/nccl/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"

date -u '+%Y-%m-%d %H:%M UTC' >"$out/summary.txt"
part 20 machine sh -c 'nvidia-smi; nproc; free -g'
part 20 libraries sh -c "ldd '$bin'/* | grep -B1 'not found' && exit 1; exit 0" || say "  $(grep 'not found' "$out/libraries.log" | head -n 3)"
if ! part 60 devices "$bin/chevron-gpu-tests" --no-colors '--source-file=*/devices_test.cpp'; then
  say "the programs do not start: see devices.log"
  exit 1
fi
if ! why=$(timeout -k 5 60 "$bin/chevron-train" --backend nccl --ranks 1 --replicas 1 --steps 1 --timeline none --trace none --data include 2>&1); then
  case $why in
    *"no GPU for"*)
      say "stopped here: $(printf '%s\n' "$why" | tail -n 1)"
      exit 1
      ;;
  esac
fi

for connections in 8 32; do
  part 40 "streams-$connections" env CUDA_DEVICE_MAX_CONNECTIONS=$connections "$python" bench/gpu/streams.py
  say "  $(tail -n 1 "$out/streams-$connections.log")"
done
for tests in streams trainer memory graphs; do
  part 90 "$tests" "$bin/chevron-gpu-tests" --no-colors "--source-file=*/${tests}_test.cpp"
done
train() {
  name=$1
  shift
  part 45 "train-$name" "$bin/chevron-train" --backend nccl --replicas 1 --steps 20 --timeout 15 --timeline none --trace none --data include "$@"
}
train alone --ranks 1
train 1F1B --share-gpus --ranks 2
train ZBV --share-gpus --ranks 2 --schedule ZBVZeroBubble
train DualPipeV --share-gpus --ranks 2 --schedule DualPipeV
train graphs --share-gpus --ranks 2 --cuda-graph
for signal in KILL STOP; do
  part 100 "lost-$signal" sh bench/gpu/lost_rank.sh "$bin" "$signal" "$out"
  say "  $(tail -n 1 "$out/lost-$signal.log")"
done
part 20 machine-after nvidia-smi
[ $failed -eq 0 ] && say "all of it ran" || say "something failed: see the logs beside this file"
exit $failed

# --backend nccl without GPUs: exit code 2 and one sentence that names the missing thing, and the remedy.
# timeout: 300
seconds=60
. "$(dirname "$0")/../support/free_port.sh"
. "$(dirname "$0")/shared/refused.sh"
bin="${CHEVRON_BUILD:?}/bin"

# refuses <pattern of the message> <command…>
refuses() {
  of_words=$1
  shift
  refused 2 "$of_words" "$@"
}

# The program without CUDA must not load libraries that only the program with CUDA needs.
if ldd "$bin/chevron-train" | grep -q torch_cuda; then
  echo "chevron-train loads libtorch_cuda"
  failed=1
fi
refuses "share-gpus is about ranks on GPUs" "$bin/chevron-train" --share-gpus
refuses "cuda-graph is about ranks on GPUs" "$bin/chevron-train" --cuda-graph

mkdir alone
cp "$bin/chevron-train" alone/
if [ ! -x "$bin/chevron-train-nccl" ]; then
  refuses "this build has no GPU support, since .*Remedy: " "$bin/chevron-train" --backend nccl
  exit $failed
fi
refuses "needs $folder/alone/chevron-train-nccl, which cannot be started: No such file" alone/chevron-train --backend nccl

nccl="$bin/chevron-train --backend nccl --steps 1 --timeline none --trace none"
if [ ! -e /dev/nvidiactl ] && [ ! -e /dev/dxg ]; then
  refuses "no GPU for local rank 3: there is no NVIDIA driver on this machine" $nccl
  refuses "no GPU for local rank 0: there is no NVIDIA driver" $nccl --ranks 1 --replicas 1
  refuses "backend copies: no GPU for local rank 0: there is no NVIDIA driver" $nccl --backend copies --ranks 1 --replicas 1

  # Started by a launcher: both ranks end with code 2. The rank whose failure rank 0 hears of first prints the cause; the second rank
  # prints the cause too, or one line that names the first. A rank that comes when rank 0 has gone already, after the second that rank 0 stays
  # to be asked, learns of nothing: such a start is tried again.
  export WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT
  for again in 1 2 3 4 5; do
    MASTER_PORT=$(free_port)
    RANK=1 LOCAL_RANK=1 timeout 150 $nccl --replicas 1 --timeout 10 >one.output 2>one.errors &
    one=$!
    zero_code=0
    RANK=0 LOCAL_RANK=0 timeout $seconds $nccl --replicas 1 >zero.output 2>zero.errors || zero_code=$?
    one_code=0
    wait $one || one_code=$?
    test $one_code -eq 4 || break
  done
  # cause <rank> <file>: the line has the cause and its remedy. deferred <rank> <other> <file>: the line names the other rank.
  cause() { grep -q "no GPU for local rank $1: there is no NVIDIA driver.*Remedy: " $2; }
  deferred() { grep -q "^rank $1: failed; rank $2's message says more$" $3; }
  lawful() {
    [ "$zero_code $one_code" = "2 2" ] && [ "$(cat zero.errors one.errors | wc -l)" -eq 2 ] || return 1
    if cause 0 zero.errors; then
      cause 1 one.errors || deferred 1 0 one.errors
    else
      cause 1 one.errors && deferred 0 1 zero.errors
    fi
  }
  if ! lawful; then
    echo "ranks of a launcher, try $again: exit codes $zero_code and $one_code, not 2, or other lines than the cause and who has it:"
    cat zero.errors one.errors
    failed=1
  fi
  unset WORLD_SIZE MASTER_ADDR MASTER_PORT
fi

# refused_with <status driver count> <words> <command…>: as if CUDA's runtime had said so.
refused_with() {
  told=$1
  words=$2
  shift 2
  refuses "$words" env LD_PRELOAD="$CHEVRON_BUILD/tests/libchevron-pretended-gpus.so" "PRETENDED_GPUS=$told" "$@"
}
refused_with "35 12040 0" "driver of this machine is for CUDA 12.4, this program for CUDA 1[0-9]" $nccl
refused_with "100 13000 0" "sees no GPU. Remedy: see whether nvidia-smi lists one" env -u CUDA_VISIBLE_DEVICES $nccl
refused_with "100 13000 0" "sees no GPU with CUDA_VISIBLE_DEVICES=7. Remedy: " env CUDA_VISIBLE_DEVICES=7 $nccl
refused_with "802 13000 0" "(802). Remedy: " $nccl
refused_with "0 13000 2" "local rank 3: there are 2 GPUs. Remedy: at most 2 ranks" env -u CUDA_VISIBLE_DEVICES $nccl --nproc 4
refused_with "0 13000 1" "local rank 1: there is 1 GPU with CUDA_VISIBLE_DEVICES=0. Remedy: at most 1 rank" \
  env CUDA_VISIBLE_DEVICES=0 $nccl --nproc 2 --replicas 1
refuses "CUDA_DEVICE_MAX_CONNECTIONS=1 lets streams wait" env CUDA_DEVICE_MAX_CONNECTIONS=1 $nccl
refuses "CUDA_DEVICE_MAX_CONNECTIONS=31 lets streams wait" env CUDA_DEVICE_MAX_CONNECTIONS=31 $nccl
# A program of run_main sets the number of queues before anything can use a GPU.
refused_with "0 13000 2 1" "local rank 3: there are 2 GPUs" env -u CUDA_DEVICE_MAX_CONNECTIONS $nccl --nproc 4
refuses "CUDA_LAUNCH_BLOCKING=1 has the host wait" env CUDA_LAUNCH_BLOCKING=1 $nccl
refuses "NCCL_LAUNCH_ORDER_IMPLICIT=1 has the host wait" env NCCL_LAUNCH_ORDER_IMPLICIT=1 $nccl
exit $failed

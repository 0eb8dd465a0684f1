#include "cluster.hpp"

#include "table.hpp"

namespace plan_program {
namespace {

std::string text(std::int64_t n) { return std::to_string(n); }

/// `1 node`, `2 nodes`.
std::string counted(std::int64_t n, char const* thing) { return text(n) + " " + thing + (n == 1 ? "" : "s"); }

/// The flags of chevron-finetune behind those of files and folders.
std::string training_flags(way const& of, described_model const& model) {
  return "--schedule " + std::string(of.schedule.name) +
         (of.schedule.takes_chunks() ? " --chunks " + text(of.schedule.chunks) : "") +
         (of.slices > 1 ? " --slices " + text(of.slices) + " --attention " + chevron::show::number(of.attention, 4) : "") +
         " --ranks " + text(of.ranks) + " --replicas " + text(of.replicas) +
         (of.shards > 1 ? " --shards " + text(of.shards) + (of.slices > 1 ? "" : " --sequence-parallel") : "") +
         " --microbatches " + text(of.micro_batches) + " --microbatch-size " + text(of.samples) + " --context " +
         text(model.setup.tokens) + (of.recompute ? " --recompute" : "") + (of.sharded ? " --shard optimizer" : "") +
         (of.post_validated ? " --post-validation" : "") + (model.setup.item < 4 ? " --dtype bfloat16" : "") +
         (model.setup.masters ? " --master-parameters" : "");
}

}  // namespace

std::string not_run_by_finetune(described_model const& model) {
  return model.size.experts > 0 ? "it has no experts" : model.size.gpt ? "it reads no folders of the kind gpt" : "";
}

std::string torchrun_command(way const& of, described_model const& model, cluster const& on) {
  return "torchrun --nnodes " + text(on.nodes) + " --nproc-per-node " + text(on.gpus) +
         " --no-python chevron-finetune --backend nccl --model FOLDER --data TOKENS --out TRAINED " + training_flags(of, model);
}

std::string slurm_script(way const& of, described_model const& model, cluster const& on) {
  std::string const nodes = text(on.nodes), gpus = text(on.gpus);
  return "#!/bin/sh\n"
         "# " +
         counted(of.ranks, "pipeline rank") + ", " + counted(of.shards, "shard") + " and " + counted(of.replicas, "replica") +
         " on " + counted(on.nodes, "node") + " of " + counted(on.gpus, "GPU") +
         ":\n"
         "#\n"
         "#     MODEL=folder DATA=tokens CHECKPOINT=folder OUT=folder sbatch THIS-FILE --steps 1000\n"
         "#\n"
         "# MODEL is a Hugging Face folder, DATA a file of tokens; the trained model goes into the folder OUT. Five minutes "
         "before its\n"
         "# time is over Slurm sends USR1: the job then saves into the folder CHECKPOINT and ends, and the same command goes "
         "on from\n"
         "# there. Further flags go to chevron-finetune.\n"
         "#\n"
         "#SBATCH --job-name=chevron-finetune\n"
         "#SBATCH --nodes=" +
         nodes +
         "\n"
         "#SBATCH --ntasks-per-node=" +
         gpus +
         "\n"
         "#SBATCH --gpus-per-node=" +
         gpus +
         "\n"
         "#SBATCH --exclusive\n"
         "#SBATCH --time=24:00:00\n"
         "#SBATCH --signal=USR1@300\n"
         "#SBATCH --output=chevron-%j.log\n"
         "set -eu\n"
         ": \"${MODEL:?is not set. Remedy: the model's folder}\" \"${DATA:?is not set. Remedy: a file of tokens}\"\n"
         ": \"${CHECKPOINT:?is not set. Remedy: a folder that all nodes see}\" \"${OUT:?is not set. Remedy: a folder for the "
         "trained "
         "model}\"\n"
         "# srun tells each process its rank and the first node. When a rank fails, the others report why and end; ranks that "
         "cannot\n"
         "# are ended after 30 s.\n"
         "exec srun --wait=30 --cpu-bind=cores \\\n"
         "  chevron-finetune --backend nccl --model \"$MODEL\" --data \"$DATA\" --checkpoint \"$CHECKPOINT\" --resume --out "
         "\"$OUT\" \\\n"
         "  " +
         training_flags(of, model) + " \"$@\"\n";
}

}  // namespace plan_program

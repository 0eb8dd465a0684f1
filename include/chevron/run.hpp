#pragma once

/// \file
/// Training and evaluation on LibTorch, with ranks as threads of one process: trainer, evaluator, `run_threads`, `run_main`.
/// Other headers include this one and add ranks as processes (<chevron/multiprocess.hpp>), ranks on GPUs (<chevron/nccl.hpp>) or
/// files (<chevron/checkpoint.hpp>); each adds compile time. Needs LibTorch; <chevron/schedule.hpp> does not.

#include <chevron/run/comm/shard_group.hpp>
#include <chevron/run/comm/threads/run_threads.hpp>
#include <chevron/run/comm/transport.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/data/split_batch.hpp>
#include <chevron/run/data/stage_loss.hpp>
#include <chevron/run/execution/executor.hpp>
#include <chevron/run/launch/run_main.hpp>
#include <chevron/run/model/backward_scope.hpp>
#include <chevron/run/model/graph/stage_graph.hpp>
#include <chevron/run/model/loss.hpp>
#include <chevron/run/model/partition.hpp>
#include <chevron/run/model/random_scope.hpp>
#include <chevron/run/model/skip.hpp>
#include <chevron/run/model/stage.hpp>
#include <chevron/run/model/stage_execution.hpp>
#include <chevron/run/optimizer/global_step.hpp>
#include <chevron/run/optimizer/gradient_buckets.hpp>
#include <chevron/run/optimizer/tied_parameters.hpp>
#include <chevron/run/trace/measured_bytes.hpp>
#include <chevron/run/trace/rank_trace.hpp>
#include <chevron/run/trace/trace_window.hpp>
#include <chevron/run/training/evaluator.hpp>
#include <chevron/run/training/layer_costs.hpp>
#include <chevron/run/training/learning_rate.hpp>
#include <chevron/run/training/preflight.hpp>
#include <chevron/run/training/trainer.hpp>

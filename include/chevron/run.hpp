#pragma once

/// \file
/// Training and evaluation on LibTorch, with ranks as threads of one process: trainer, evaluator, `run_threads`, `run_main`.
/// Other headers include this one and add ranks as processes (<chevron/multiprocess.hpp>), ranks on GPUs (<chevron/nccl.hpp>) or
/// files (<chevron/checkpoint.hpp>); each adds compile time. Needs LibTorch; <chevron/schedule.hpp> does not.

#include <chevron/jobs/run_main.hpp>
#include <chevron/run/comm/shard_group.hpp>
#include <chevron/run/comm/threads/run_threads.hpp>
#include <chevron/run/comm/transport.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/measured_bytes.hpp>
#include <chevron/run/core/rank_trace.hpp>
#include <chevron/run/stage/backward_scope.hpp>
#include <chevron/run/stage/loss.hpp>
#include <chevron/run/stage/partition.hpp>
#include <chevron/run/stage/random_scope.hpp>
#include <chevron/run/stage/skip.hpp>
#include <chevron/run/stage/split_batch.hpp>
#include <chevron/run/stage/stage.hpp>
#include <chevron/run/stage/stage_loss.hpp>
#include <chevron/run/train/evaluator.hpp>
#include <chevron/run/train/layer_costs.hpp>
#include <chevron/run/train/learning_rate.hpp>
#include <chevron/run/train/preflight.hpp>
#include <chevron/run/train/trainer.hpp>
#include <chevron/tools/profile/measured_picture.hpp>
#include <chevron/tools/profile/trace_window.hpp>

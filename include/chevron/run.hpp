#pragma once

/// \file
/// Training and evaluation on LibTorch, with ranks as threads of one process: trainer, evaluator, `run_threads`, `run_main`.
/// Ranks as processes come with <chevron/multiprocess.hpp>, on GPUs with <chevron/nccl.hpp>, files with <chevron/checkpoint.hpp>:
/// each costs time to compile, and includes this. Needs LibTorch; <chevron/schedule.hpp> does not.

#include <chevron/run/chunk.hpp>
#include <chevron/run/error.hpp>
#include <chevron/run/evaluator.hpp>
#include <chevron/run/executor.hpp>
#include <chevron/run/gradients.hpp>
#include <chevron/run/learning_rate.hpp>
#include <chevron/run/loss.hpp>
#include <chevron/run/main.hpp>
#include <chevron/run/micro_batch.hpp>
#include <chevron/run/optimizer_step.hpp>
#include <chevron/run/partition.hpp>
#include <chevron/run/preflight.hpp>
#include <chevron/run/random.hpp>
#include <chevron/run/record.hpp>
#include <chevron/run/skip.hpp>
#include <chevron/run/split_backward.hpp>
#include <chevron/run/stage.hpp>
#include <chevron/run/step_records.hpp>
#include <chevron/run/threads.hpp>
#include <chevron/run/tied.hpp>
#include <chevron/run/trainer.hpp>
#include <chevron/run/transport.hpp>

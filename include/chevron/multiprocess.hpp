#pragma once

/// \file
/// Includes <chevron/run.hpp> and adds ranks as processes: `launch` forks the processes or connects to a launcher, and
/// `gloo_transport` sends messages between them.

#include <chevron/jobs/launch.hpp>
#include <chevron/run.hpp>
#include <chevron/transports/gloo/gloo_transport.hpp>
#include <chevron/transports/gloo/run_processes.hpp>

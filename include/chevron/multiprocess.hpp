#pragma once

/// \file
/// <chevron/run.hpp>, and ranks as processes: `launch`, started by a launcher or by itself, and `gloo_transport` between them.

#include <chevron/run.hpp>
#include <chevron/run/gloo.hpp>
#include <chevron/run/launch.hpp>

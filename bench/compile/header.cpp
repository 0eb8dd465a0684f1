// The umbrella header and nothing else: what every file that uses schedules pays.
#include <chevron/schedule.hpp>

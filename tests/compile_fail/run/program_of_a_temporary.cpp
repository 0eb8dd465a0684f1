// A program that ends at the end of the line is refused by the functions that run ranks, with the remedy.
// expect: static assertion failed.*this program ends at the end of the line: store it in a variable first
// errors: 2
// timeout: 300
#include <chevron/multiprocess.hpp>
#include <chevron/schedule.hpp>

int main() {
  auto const proved = chevron::prove(chevron::catalogue::make_plan("GPipe", {.ranks = 1, .micro_batches = 1}));
  auto const body = [](chevron::transport&) {};
#ifdef LEGAL
  auto const program = chevron::lower(proved);
  chevron::run_processes(program, {}, body);
  chevron::run_threads(program, {}, body);
  chevron::run_threads(chevron::lowered<chevron::catalogue::gpipe, chevron::shape{.ranks = 1, .micro_batches = 1}>, {}, body);
#else
  chevron::run_processes(chevron::lower(proved), {}, body);
  chevron::run_threads(chevron::lower(proved), {}, body);
#endif
}

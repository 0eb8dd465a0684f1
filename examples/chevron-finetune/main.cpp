// chevron-finetune: a Hugging Face folder and files of tokens in, a Hugging Face folder out, under a schedule that was proved
// first.

#include <chevron/run/launch/run_main.hpp>

#include "common/end_program.hpp"
#include "finetune.hpp"

int main(int argc, char** argv) {
  chevron::train::end_program(
      chevron::run_main(argc, argv, [](int count, char** words) { return chevron::finetune::start(count, words, nullptr); }));
}

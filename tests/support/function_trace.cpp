// Records the functions that a few calls pass in each thread, for a program whose other files are compiled with
// -finstrument-functions. Variables of the environment:
//
//   TRACED_FUNCTIONS  addresses within the program, hexadecimal, with commas between; a call of any of them may be traced
//   FIRST_TRACED      the first traced call's number in each thread, from 0; a call within a call is not counted
//   LAST_TRACED       the last traced call's number
//   TRACE_FILE        gets for each call a count of 8 bytes, then so many addresses: the entry of a function, or 0 at its end
//
// The hooks call no template of the standard library: the linker may take another file's instrumented copy.
#include <fcntl.h>
#include <link.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <memory>

// clang 16 calls these members in instrumented code without a definition, as libstdc++ declares their instantiation elsewhere.
template class std::allocator<char>;

namespace {

constexpr int most_functions = 64;
constexpr std::uint64_t most_entries = 1 << 20;

std::uint64_t base = 0;
std::uint64_t functions[most_functions];
int function_count = 0;
long first_traced = 0, last_traced = 0;

struct thread_trace {
  std::uint64_t* entries = nullptr;  // while a call is traced; the first entry is the count of all others
  long calls = 0;
  int depth = 0;  // of functions within the call of a traced function; 0: outside
};
thread_local thread_trace here;

int note_base(dl_phdr_info* program, std::size_t, void*) {
  base = program->dlpi_addr;
  return 1;  // the program is listed first
}

__attribute__((constructor)) void read_environment() {
  dl_iterate_phdr(note_base, nullptr);
  char const* next = std::getenv("TRACED_FUNCTIONS");
  while (next != nullptr && *next != '\0' && function_count < most_functions) {
    char* end = nullptr;
    functions[function_count++] = std::strtoull(next, &end, 16);
    next = *end == ',' ? end + 1 : nullptr;
  }
  if (char const* const first = std::getenv("FIRST_TRACED")) first_traced = std::strtol(first, nullptr, 10);
  if (char const* const last = std::getenv("LAST_TRACED")) last_traced = std::strtol(last, nullptr, 10);
}

bool may_be_traced(std::uint64_t function) {
  for (int i = 0; i < function_count; ++i) {
    if (functions[i] == function) return true;
  }
  return false;
}

void add(std::uint64_t entry) {
  if (here.entries == nullptr) return;
  if (here.entries[0] + 1 == most_entries) std::abort();
  here.entries[++here.entries[0]] = entry;
}

void write_trace() {
  int const file = open(std::getenv("TRACE_FILE"), O_WRONLY | O_CREAT | O_APPEND, 0644);
  std::size_t const bytes = (here.entries[0] + 1) * sizeof(std::uint64_t);
  if (file < 0 || write(file, here.entries, bytes) != static_cast<ssize_t>(bytes)) std::abort();
  close(file);
  std::free(here.entries);
  here.entries = nullptr;
}

}  // namespace

extern "C" void __cyg_profile_func_enter(void* function, void*) {
  std::uint64_t const address = reinterpret_cast<std::uint64_t>(function) - base;
  if (here.depth == 0) {
    if (!may_be_traced(address)) return;
    bool const traced = here.calls >= first_traced && here.calls <= last_traced;
    ++here.calls;
    if (traced) here.entries = static_cast<std::uint64_t*>(std::calloc(most_entries, sizeof(std::uint64_t)));
  }
  ++here.depth;
  add(address);
}

extern "C" void __cyg_profile_func_exit(void*, void*) {
  if (here.depth == 0) return;
  add(0);
  if (--here.depth == 0 && here.entries != nullptr) write_trace();
}

// timeout: 120
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <exception>
#include <filesystem>
#include <functional>
#include <iterator>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include <ATen/ATen.h>

#include <chevron/transports/gloo/gloo_transport.hpp>
#include <chevron/transports/shared_memory/shared_memory.hpp>

#include "support/gloo_ranks.hpp"
#include "support/retry.hpp"

#include <doctest/doctest.h>

using namespace chevron;
using namespace std::chrono_literals;
using chevron::detail::shared_file;
using chevron::detail::shared_memory;
using gloo_ranks::all_share;
using gloo_ranks::check_all_well;
using gloo_ranks::on_ranks;

namespace {

using steady = std::chrono::steady_clock;

using thread_ranks::recv_b;
using thread_ranks::recv_f;
using thread_ranks::send_b;
using thread_ranks::send_f;

/// All ranks come here before any goes on.
void meet(gloo_transport& link) {
  double const mine = link.topology().global_rank;
  std::vector<double> all(static_cast<std::size_t>(link.topology().world()));
  link.all_gather({&mine, 1}, all);
}

std::size_t entries(char const* folder) {
  auto const in = std::filesystem::directory_iterator(folder);
  return static_cast<std::size_t>(std::distance(begin(in), end(in)));
}

std::unique_ptr<shared_memory> pair_of(std::unique_ptr<shared_memory> const& other, int rank) {
  auto mine = shared_memory::make(rank, 2);
  REQUIRE(mine != nullptr);
  REQUIRE(mine->map(1 - rank, other->address()));
  return mine;
}

}  // namespace

TEST_CASE("where files may not be long enough for the memory, messages go by Gloo, and no signal ends the ranks") {
  rlimit before{};
  REQUIRE(getrlimit(RLIMIT_FSIZE, &before) == 0);
  struct at_end {
    rlimit before;
    ~at_end() { setrlimit(RLIMIT_FSIZE, &before); }
  } const restored{before};
  rlimit const small{.rlim_cur = 1 << 20, .rlim_max = before.rlim_max};
  REQUIRE(setrlimit(RLIMIT_FSIZE, &small) == 0);
  CHECK(shared_file::make(2 << 20) == nullptr);
  CHECK(shared_file::make(1 << 19) != nullptr);
  check_all_well(on_ranks(2, 1, all_share, [](gloo_transport& link) {
    int const me = link.topology().global_rank;
    at::Tensor const sent = at::full({3}, 7.0);
    if (me == 0) {
      link.post_send(1, send_f(0, 0), 0, {&sent, 1});
      link.wait_send(0);
    } else {
      link.post_receive(0, recv_f(1, 0), 0);
      if (!link.receive(0)[0].equal(sent)) throw std::logic_error("other values");
    }
    meet(link);
  }));
}

TEST_CASE("a file is found by its address, by nobody else, and only while it is open") {
  auto const file = shared_file::make(1 << 20);
  REQUIRE(file != nullptr);
  std::memcpy(file->memory() + 5, "here", 5);
  auto const address = file->address();
  {
    auto const seen = shared_file::open(address);
    REQUIRE(seen != nullptr);
    CHECK(seen->bytes() == 1 << 20);
    CHECK(std::string(reinterpret_cast<char const*>(seen->memory() + 5)) == "here");
    CHECK(seen->memory() != file->memory());
    seen->memory()[9] = std::byte{'s'};
    seen->memory()[10] = std::byte{0};
    CHECK(std::string(reinterpret_cast<char const*>(file->memory() + 5)) == "heres");
  }
  // Another machine, process, number or name; and texts that are no addresses.
  std::istringstream in(address);
  std::string machine, process, number, name;
  in >> machine >> process >> number >> name;
  for (std::string const& other :
       {"0" + machine + " " + process + " " + number + " " + name, machine + " 1 " + number + " " + name,
        machine + " " + process + " 0 " + name, machine + " " + process + " " + number + " " + name + "1",
        machine + " " + process + " " + number, std::string()}) {
    INFO(other);
    CHECK(shared_file::open(other) == nullptr);
  }
  file->close();
  CHECK(shared_file::open(address) == nullptr);
}

TEST_CASE("nothing is left behind: no name, no descriptor, nor after kill -9") {
  // Others make and remove names there, too, but not each time.
  retry::until_well([](retry::complaints& wrong, int) {
    auto const names = entries("/dev/shm"), descriptors = entries("/proc/self/fd");
    check_all_well(on_ranks(3, 1, all_share, meet));
    wrong.unless(entries("/dev/shm") == names, "no new name");
    CHECK(entries("/proc/self/fd") == descriptors);

    int ends[2];
    REQUIRE(pipe(ends) == 0);
    pid_t const child = fork();
    if (child == 0) {
      auto const file = shared_file::make(1 << 20);
      std::memset(file->memory(), 1, file->bytes());
      auto const address = file->address() + "\n";
      if (write(ends[1], address.data(), address.size()) < 0) _exit(1);
      pause();
    }
    char text[256] = {};
    REQUIRE(read(ends[0], text, sizeof text - 1) > 0);
    auto const seen = shared_file::open(text);
    REQUIRE(seen != nullptr);
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    CHECK(seen->memory()[12345] == std::byte{1});  // a mapping outlives the process that made the file
    CHECK(shared_file::open(text) == nullptr);
    wrong.unless(entries("/dev/shm") == names, "no new name after kill -9");
    close(ends[0]);
    close(ends[1]);
  });
}

TEST_CASE("a sleeper is woken by the bell, and by its time") {
  auto const first = shared_memory::make(0, 2);
  REQUIRE(first != nullptr);
  auto const second = pair_of(first, 1);
  REQUIRE(first->map(1, second->address()));
  auto const never = [] { return false; };
  auto const begin = steady::now();
  first->sleep(never, 30ms);
  CHECK(steady::now() - begin >= 29ms);
  // A sleeper that misses its bell from here on sleeps longer than the test's time limit.
  first->sleep([] { return true; }, 1h);

  // Each answers the other's number a thousand times.
  std::atomic<int> ball{0};
  auto const play = [&](shared_memory& mine, int me) {
    for (int i = me; i < 2000; i += 2) {
      auto const my_turn = [&] { return ball.load() == i; };
      while (!my_turn()) mine.sleep(my_turn, 1h);
      ball = i + 1;
      mine.notify(1 - me);
    }
  };
  std::thread other([&] { play(*second, 1); });
  play(*first, 0);
  other.join();
  CHECK(ball == 2000);
}

TEST_CASE("blocks are used again as soon as they were read, and only then") {
  auto const memory = shared_memory::make(0, 2);
  REQUIRE(memory != nullptr);
  chevron::detail::shared_message& message = *memory->new_message();
  CHECK(message.sent == 0);
  auto const fill = [&](std::size_t bytes, std::uint64_t number) {
    auto* const room = memory->free_block(bytes);
    REQUIRE(room != nullptr);
    room->message = &message, room->number = number;
    return room->offset;
  };
  auto const a = fill(1000, 1), b = fill(1000, 2), c = fill(64, 3);
  CHECK(b >= a + 1000);
  CHECK(c >= b + 1000);
  CHECK_FALSE(memory->all_taken());
  chevron::detail::publish(message.taken, std::uint64_t{1});
  CHECK(fill(1000, 4) == a);  // b is not taken yet
  chevron::detail::publish(message.taken, std::uint64_t{4});
  CHECK(memory->all_taken());
  CHECK(memory->free_block(64)->offset == c);
  // There is an end: 256 MiB.
  int count = 0;
  for (; count < 300; ++count) {
    auto* const room = memory->free_block(shared_memory::largest_message);
    if (room == nullptr) break;
    room->message = &message, room->number = 5;
  }
  CHECK(count > 200);
  CHECK(count < 256);
  memory->start_anew();
  CHECK(memory->free_block(1)->offset == a);
}

TEST_CASE("what was sent may be written to after wait_send, long before it is taken") {
  check_all_well(on_ranks(2, 1, all_share, [](gloo_transport& link) {
    for (long step = 0; step < 3; ++step) {
      link.begin_step(step);
      if (link.topology().global_rank == 0) {
        at::Tensor value = at::full({100}, static_cast<double>(step));
        for (int m = 0; m < 8; ++m) {
          value.fill_(static_cast<double>(10 * step + m));
          link.post_send(1, send_f(0, m), 0, {&value, 1});
          if (step == 0) continue;  // those wait to be taken
          link.wait_send(0);
        }
        if (step > 0) value.fill_(-1);
        if (step > 0) meet(link);
      } else {
        if (step > 0) meet(link);  // all were sent
        for (int m = 0; m < 8; ++m) {
          link.post_receive(0, recv_f(1, m), 0);
          CHECK(at::equal(link.receive(0)[0], at::full({100}, static_cast<double>(10 * step + m))));
        }
      }
    }
  }));
}

TEST_CASE("a sender is at most two steps ahead, and a receiver that comes late gets every message") {
  std::atomic<long> sent{0};
  check_all_well(on_ranks(2, 1, all_share, [&](gloo_transport& link) {
    for (long step = 0; step < 7; ++step) {
      link.begin_step(step);
      if (link.topology().global_rank == 0) {
        at::Tensor const value = at::full({9}, static_cast<double>(step));
        link.post_send(1, send_f(0, 0), 0, {&value, 1});
        link.wait_send(0);
        sent = step + 1;
      } else {
        if (step == 1) {
          for (int i = 0; i < 5000 && sent < 3; ++i) std::this_thread::sleep_for(10ms);
          std::this_thread::sleep_for(100ms);
          CHECK(sent == 3);  // the first by Gloo and two in memory
        }
        link.post_receive(0, recv_f(1, 0), 0);
        CHECK(at::equal(link.receive(0)[0], at::full({9}, static_cast<double>(step))));
      }
    }
  }));
}

TEST_CASE("two ranks that both wait for room take what the other has sent") {
  // Each is two ahead of the other and wants to send once more before it takes anything.
  check_all_well(on_ranks(2, 1, all_share, [](gloo_transport& link) {
    int const me = link.topology().global_rank;
    auto const send = [&](long number) {
      at::Tensor const value = at::full({5}, static_cast<double>(10 * me + number));
      link.post_send(1 - me, me == 0 ? send_f(0, 0) : send_b(1, 0), 0, {&value, 1});
    };
    auto const expect = [&](long number, std::uint16_t slot) {
      CHECK(at::equal(link.receive(slot)[0], at::full({5}, static_cast<double>(10 * (1 - me) + number))));
    };
    auto const post = [&](std::uint16_t slot) { link.post_receive(1 - me, me == 0 ? recv_b(0, 0) : recv_f(1, 0), slot); };
    link.begin_step(0);
    post(0);
    send(0);
    expect(0, 0);
    link.begin_step(1);
    for (std::uint16_t slot = 1; slot <= 3; ++slot) post(slot);
    for (long number = 1; number <= 3; ++number) send(number);
    for (std::uint16_t slot = 1; slot <= 3; ++slot) expect(slot, slot);
  }));
}

// timeout: 120
#include <signal.h>
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

#include <chevron/run/comm/gloo/gloo_transport.hpp>
#include <chevron/run/comm/shared_memory/shared_memory.hpp>

#include "support/gloo_ranks.hpp"
#include "support/retry.hpp"

#include <doctest/doctest.h>

using namespace chevron;
using namespace std::chrono_literals;
using chevron::detail::shared_file;
using chevron::detail::shared_memory;
using near_ranks::all_share;
using near_ranks::check_all_well;
using near_ranks::on_ranks;

namespace {

using steady = std::chrono::steady_clock;

using ranks::recv_b;
using ranks::recv_f;
using ranks::send_b;
using ranks::send_f;

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
  // Another machine, process, number or name; and what is no address at all.
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
  tries::until_well([](tries::complaints& wrong, int) {
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
    CHECK(seen->memory()[12345] == std::byte{1});  // who has mapped it keeps it
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
  // Who oversleeps from here on sleeps longer than this test may take.
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

TEST_CASE("what arrives is the same whoever shares memory, for all sizes, over many steps and turns") {
  std::vector<std::vector<at::Tensor>> messages;
  std::int64_t const most = static_cast<std::int64_t>(shared_memory::largest_message);
  for (std::int64_t const bytes :
       {std::int64_t{0}, std::int64_t{1}, std::int64_t{63}, std::int64_t{64}, std::int64_t{4097}, most, most + 1}) {
    messages.push_back({at::empty({bytes}, at::kByte).random_()});
  }
  messages.push_back({});  // no tensor at all
  messages.push_back({at::randn({3, 5}), at::Tensor(), at::arange(24, at::kFloat).view({4, 6}).t(), at::empty({0, 3}),
                      at::scalar_tensor(2.5, at::kDouble), at::randn({7}).to(at::kBFloat16),
                      at::tensor({1, 0, 1}).to(at::kBool)});
  std::function<bool(int)> const sharing[] = {all_share, [](int) { return false; }, [](int r) { return r != 1; }};
  for (auto const& shared : sharing) {
    check_all_well(on_ranks(3, 1, shared, [&](gloo_transport& link) {
      int const me = link.topology().global_rank;
      for (int turn = 0; turn < 2; ++turn) {
        if (turn > 0) link.open({.activation = 0, .receive = 1, .send = 1});
        for (long step = 0; step < 4; ++step) {
          link.begin_step(step);
          for (std::size_t i = 0; i < messages.size(); ++i) {
            int const m = static_cast<int>(i);
            std::vector<at::Tensor> wanted;
            for (auto const& t : messages[i]) wanted.push_back(t.defined() && t.is_floating_point() ? t + step + turn : t);
            if (me > 0) {
              link.post_receive(me - 1, recv_f(me, m), 0);
              auto const got = link.receive(0);
              REQUIRE(got.size() == wanted.size());
              for (std::size_t k = 0; k < got.size(); ++k) {
                REQUIRE(got[k].defined() == wanted[k].defined());
                if (!got[k].defined()) continue;
                CHECK((got[k].scalar_type() == wanted[k].scalar_type()));
                CHECK((got[k].sizes() == wanted[k].sizes()));
                CHECK(at::equal(got[k], wanted[k]));
              }
            }
            if (me < 2) {
              link.post_send(me + 1, send_f(me, m), 0, wanted);
              link.wait_send(0);
            }
          }
        }
      }
    }));
  }
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

TEST_CASE("gathers: any size, both kinds at once, on boards and beyond them") {
  std::function<bool(int)> const sharing[] = {all_share, [](int r) { return r == 0; }};
  for (auto const& shared : sharing) {
    check_all_well(on_ranks(3, 1, shared, [](gloo_transport& link) {
      int const me = link.topology().global_rank;
      auto const board = shared_memory::largest_gather / sizeof(double);
      for (std::size_t const count : {std::size_t{0}, std::size_t{1}, board, board + 1}) {
        for (int round = 0; round < 5; ++round) {
          auto const numbers = [&](int r, double kind) { return std::vector<double>(count, 100 * kind + 10 * round + r); };
          auto const all_of = [&](double kind) {
            std::vector<double> out;
            for (int r = 0; r < 3; ++r) {
              auto const part = numbers(r, kind);
              out.insert(out.end(), part.begin(), part.end());
            }
            return out;
          };
          std::vector<double> early(3 * count), all(3 * count);
          link.start_all_gather(numbers(me, 1));
          if (me == round % 3) std::this_thread::sleep_for(1ms);
          link.all_gather(numbers(me, 2), all);
          CHECK(all == all_of(2));
          link.finish_all_gather(early);
          CHECK(early == all_of(1));
        }
      }
    }));
  }
}

TEST_CASE("a gather of different sizes is refused, not mixed up") {
  auto const thrown = on_ranks(2, 1, all_share, [](gloo_transport& link) {
    std::vector<double> const mine(link.topology().global_rank == 0 ? 2 : 3);
    std::vector<double> all(2 * mine.size());
    link.all_gather(mine, all);
  });
  CHECK(thrown[0].find("rank 1 gathers 24 bytes where rank 0 gathers 16") != std::string::npos);
  CHECK(thrown[1].find("rank 0 gathers 16 bytes where rank 1 gathers 24") != std::string::npos);
}

TEST_CASE("a deadline and another rank's failure end waits in memory, too") {
  for (bool const fails : {false, true}) {
    tries::until_well([&](tries::complaints& wrong, int) {
      auto const thrown = on_ranks(3, 1, all_share, [&](gloo_transport& link) {
        int const me = link.topology().global_rank;
        at::Tensor const value = at::ones({3});
        link.begin_step(0);
        if (me == 0) link.post_send(1, send_f(0, 0), 0, {&value, 1});
        if (me == 1) {
          link.post_receive(0, recv_f(1, 0), 0);
          link.receive(0);
        }
        meet(link);
        link.begin_step(1);
        if (me == 1) {
          if (!fails) link.deadline(700ms);
          link.post_receive(0, recv_f(1, 0), 0);
          auto const begin = steady::now();
          tries::stopwatch const since;
          try {
            link.receive(0);
          } catch (timeout_error const& e) {
            CHECK(!fails);
            CHECK(steady::now() - begin >= 690ms);
            wrong.unless(since.spent() < 1700ms, "the deadline is kept");
            wrong.unless(e.what() == std::string("rank 1, step 1, 1RECV_F0: rank 0 did not answer within 700 ms; this rank was "
                                                 "waiting for 1RECV_F0 from rank 0"),
                         std::string("rank 0 is named: ") + e.what());
          }
          link.begin_step(2);
        } else if (fails && me == 2) {
          at::Tensor const other = at::ones({4});
          std::this_thread::sleep_for(100ms);
          link.post_send(0, send_b(2, 1), 1, {&other, 1});
          link.post_send(0, send_b(2, 1), 1, {&value, 1});  // refused: it agreed on four numbers
        } else {
          for (;; std::this_thread::sleep_for(5ms)) link.begin_step(2);  // computes until it hears of the failure
        }
      });
      for (int r = 0; r < 3; ++r) {
        auto const& said = thrown[static_cast<std::size_t>(r)];
        INFO("rank " << r << ", fails: " << fails << ": " << said);
        CHECK(!said.empty());
        auto const wanted = fails ? "would send" : "rank 0 did not answer within 700 ms";
        wrong.unless(said.find(wanted) != std::string::npos, std::string(wanted) + ", but: " + said);
      }
    });
  }
}

#include <cmath>
#include <limits>
#include <map>
#include <set>
#include <string>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <chevron/csv/csv.hpp>
#include <chevron/lower/lower.hpp>
#include <chevron/tools/show/chrome_trace.hpp>
#include <chevron/tools/show/json.hpp>
#include <chevron/tools/show/program_text.hpp>

#include "show_support.hpp"

using namespace chevron;
using nlohmann::json;
using show_test::plan_from;
using show_test::split;

TEST_SUITE("show json") {
  TEST_CASE("the promised keys, equal to the analyses") {
    show_test::for_each_plan([](plan const& p) {
      costs const cost{1, 1.5, 0.5, 0.1};
      json const read = json::parse(show::json(p, cost));
      CHECK(read.at("schedule") == p.name);
      CHECK(read.at("ranks") == p.size.ranks);
      CHECK(read.at("chunks") == p.stages / p.size.ranks);
      CHECK(read.at("micro_batches") == p.size.micro_batches);
      // Written so that the very same double is read back.
      CHECK(read.at("makespan").get<double>() == makespan(p, cost));
      CHECK(read.at("span").get<double>() == span(p, cost));
      CHECK(read.at("bubble_makespan").get<double>() == bubble_makespan(p, cost));
      CHECK(read.at("bubble_span").get<double>() == bubble_span(p, cost));
      CHECK(read.at("messages") == messages(p));
      REQUIRE(read.at("peak_in_flight").size() == static_cast<std::size_t>(p.size.ranks));
      REQUIRE(read.at("actions").size() == static_cast<std::size_t>(p.size.ranks));
      plan_view const view = p;
      for (int r = 0; r < p.size.ranks; ++r) {
        CHECK(read.at("peak_in_flight")[static_cast<std::size_t>(r)] == peak_in_flight(p, r));
        json const& list = read.at("actions")[static_cast<std::size_t>(r)];
        std::size_t at = 0;
        for (int i = view.begin[r]; i < view.begin[r + 1]; ++i) {
          std::string const wanted = show_test::spelled(view, r, i);
          if (!wanted.empty()) CHECK(list.at(at++) == wanted);
        }
        CHECK(list.size() == at);
      }
      CHECK(read.at("costs").at("forward").size() == static_cast<std::size_t>(p.stages));
      CHECK(read.at("costs").at("communication").size() == static_cast<std::size_t>(p.stages - 1));
      for (json const& boundary : read.at("costs").at("communication")) CHECK(boundary == 0.1);
      CHECK(read.at("steady_step_time").get<double>() == steady_step_time(p, cost).most);
      CHECK(read.at("steps") == 1);
      CHECK(read.at("makespan_of_steps") == read.at("makespan"));
      CHECK(read.at("peak_bytes").is_null());
      CHECK(read.at("message_bytes").is_null());
    });
  }

  TEST_CASE("what is said of ranks, of the path and of memory over time agrees with the rest") {
    show_test::for_each_plan([](plan const& p) {
      CAPTURE(p.name);
      costs const cost{1, 1.5, 0.5, 0.25, 0.5, occupies::sender};
      json const read = json::parse(show::json(p, cost, sizes{1000, 10}, 3));
      double const makespan = read.at("makespan");
      for (int r = 0; r < p.size.ranks; ++r) {
        std::size_t const at = static_cast<std::size_t>(r);
        json const& idle = read.at("idle")[at];
        double sum = read.at("busy")[at];
        for (char const* key : {"fill", "steady", "drain", "communicating"}) sum += idle.at(key).get<double>();
        CHECK(sum == doctest::Approx(makespan));
        CHECK(read.at("peak_bytes")[at] == 1000 * peak_in_flight(p, r));
        int most = 0;
        double before = 0;
        json const& points = read.at("in_flight_over_time")[at];
        for (json const& point : points) {
          CHECK(point[0].get<double>() >= before);
          before = point[0];
          most = std::max(most, point[1].get<int>());
        }
        CHECK(most == peak_in_flight(p, r));
        CHECK(points.back()[1] == 0);
      }
      CHECK(read.at("message_bytes") == 10 * messages(p));
      CHECK(read.at("steps") == 3);
      CHECK(read.at("makespan_of_steps").get<double>() == chevron::makespan(back_to_back(p, 3), cost));
      CHECK(read.at("costs").at("communication_occupies") == "sender");
      double at = 0;
      for (json const& step : read.at("critical_path")) {
        CHECK(step.at("start").get<double>() == doctest::Approx(at + step.at("communicating").get<double>()));
        at = step.at("end");
      }
      CHECK(at == makespan);
    });
  }

  TEST_CASE("strings of any bytes and numbers of any value parse") {
    std::string every;
    for (int c = 1; c < 256; ++c) every += static_cast<char>(c);
    CHECK(json::accept(show::json_string(every)));
    CHECK(json::parse(show::json_string("quote \" slash \\ line\n tab\t \xc3\x97 \xf0\x9f\x98\x80 \x7f")) ==
          "quote \" slash \\ line\n tab\t \xc3\x97 \xf0\x9f\x98\x80 \x7f");
    CHECK(json::parse(show::json_string("\xed\xa0\x80")) == "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd");  // a surrogate
    CHECK(json::parse(show::json_string("\xc3")) == "\xef\xbf\xbd");                                  // cut off
    CHECK(json::parse(show::exact(std::numeric_limits<double>::quiet_NaN())).is_null());
    for (double value : {0.1, 1e-300, 1.0 / 3, 1e21, -2.5}) CHECK(json::parse(show::exact(value)).get<double>() == value);
    plan p = plan_from({"0F0 0B0"}, {0}, 1, "a \"name\"\\");
    CHECK(json::parse(show::json(p, costs{})).at("schedule") == "a \"name\"\\");
  }
}

TEST_SUITE("show csv") {
  TEST_CASE("the rows are the ranks' lists, read back action by action") {
    show_test::for_each_plan([](plan const& p) {
      std::string const file = show::csv(p);
      REQUIRE(file.ends_with("\n"));
      std::vector<std::string> rows = split(file, '\n');
      rows.pop_back();
      for (std::string& row : rows) std::replace(row.begin(), row.end(), ',', ' ');
      std::vector<int> rank_of(p.rank_of.begin(), p.rank_of.end());
      plan const back = plan_from(rows, rank_of, p.size.micro_batches);
      plan_view const a = p, b = back;
      REQUIRE(b.size.ranks == a.size.ranks);
      REQUIRE(b.total() == a.total());
      bool same = true;
      for (int r = 0; r <= a.size.ranks; ++r) same = same && a.begin[r] == b.begin[r];
      for (int i = 0; i < a.total(); ++i) same = same && a.actions[i] == b.actions[i];
      CHECK(same);
    });
  }

  TEST_CASE("with idle time, columns are steps") {
    plan const p = plan_from({"0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"}, {0, 1}, 2);
    CHECK(show::csv(p, show::idle_cells::written) == "0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1\n");
    show_test::for_each_plan([](plan const& made) {
      std::string const with = show::csv(made, show::idle_cells::written);
      // Without its empty cells it is the same file.
      std::string packed;
      for (std::string const& row : split(with, '\n')) {
        std::string out;
        for (std::string const& cell : split(row, ',')) out += (cell.empty() || out.empty() ? "" : ",") + cell;
        packed += out + "\n";
      }
      packed.pop_back();
      CHECK(packed == show::csv(made));
      // Every action's column is right of the columns of the actions that it needs.
      std::map<std::string, std::size_t> column;
      for (std::string const& row : split(with, '\n')) {
        std::vector<std::string> const cells = split(row, ',');
        for (std::size_t i = 0; i < cells.size(); ++i) {
          // Both halves of a pair are in its column.
          std::string const cell = cells[i].substr(0, cells[i].find(')'));
          for (std::string const& half : split(cell.starts_with("(") ? cell.substr(1) : cell, ';')) {
            if (!half.empty()) column[half] = i;
          }
        }
      }
      plan_view const view = made;
      for (int i = 0; i < view.total(); ++i) {
        action const a = view.actions[i];
        if (a.kind != kind::forward || a.stage == 0) continue;
        CHECK(
            column.at(to_text(a).str()) >
            column.at(to_text(make_action(kind::forward, static_cast<int>(a.stage) - 1, static_cast<int>(a.micro_batch))).str()));
      }
    });
    plan const stuck = plan_from({"0F0 0B0", "1B0 1F0"}, {0, 1}, 1);
    CHECK(show::csv(stuck, show::idle_cells::written) == "0F0\n\n");
  }
}

TEST_SUITE("show trace") {
  TEST_CASE("a slice an action, flows in pairs that lie in their slices, counters that end at zero") {
    show_test::for_each_plan([](plan const& p) {
      CAPTURE(p.name);
      costs const cost{1, 1.5, 0.5, 0.25};
      timeline const when = simulate(p, cost);
      json const trace = json::parse(show::chrome_trace(p, cost));
      CHECK(trace.at("displayTimeUnit") == "ms");
      std::map<std::string, json> slices;
      std::map<int, std::vector<json>> flows;
      std::map<int, int> in_flight, most;
      std::map<int, double> last_count;
      std::set<int> named;
      for (json const& e : trace.at("traceEvents")) {
        std::string const phase = e.at("ph");
        if (phase == "X") {
          CHECK(slices.emplace(e.at("name").get<std::string>(), e).second);
        } else if (phase == "s" || phase == "f") {
          flows[e.at("id")].push_back(e);
        } else if (phase == "C") {
          int const pid = e.at("pid");
          CHECK(e.at("ts").get<double>() >= last_count[pid]);
          last_count[pid] = e.at("ts");
          in_flight[pid] = e.at("args").at("chunks");
          most[pid] = std::max(most[pid], in_flight[pid]);
        } else {
          REQUIRE(phase == "M");
          if (e.at("name") == "process_name") named.insert(e.at("pid").get<int>());
        }
      }
      plan_view const view = p;
      std::size_t wanted = 0;
      for (int r = 0; r < view.size.ranks; ++r) {
        CHECK(named.count(r) == 1);
        CHECK(in_flight[r] == 0);
        CHECK(most[r] == peak_in_flight(p, r));
        for (int i = view.begin[r]; i < view.begin[r + 1]; ++i) {
          std::string const name = show_test::spelled(view, r, i);
          if (name.empty()) continue;
          ++wanted;
          json const& e = slices.at("PP:" + name);
          CHECK(e.at("pid") == r);
          CHECK(e.at("ts").get<double>() == doctest::Approx(when.start.data[i] * 1000));
          CHECK(e.at("dur").get<double>() == doctest::Approx((when.end.data[i] - when.start.data[i]) * 1000));
        }
      }
      CHECK(slices.size() == wanted);
      CHECK(flows.size() == static_cast<std::size_t>(messages(p)));
      auto const inside_one = [&](json const& flow) {
        for (auto const& [name, e] : slices) {
          double const start = e.at("ts"), length = e.at("dur"), t = flow.at("ts");
          if (e.at("pid") == flow.at("pid") && e.at("tid") == flow.at("tid") && t >= start && t < start + length) return true;
        }
        return false;
      };
      for (auto const& [id, ends] : flows) {
        REQUIRE(ends.size() == 2);
        CHECK(ends[0].at("ph") == "s");
        CHECK(ends[1].at("ph") == "f");
        CHECK(ends[1].at("bp") == "e");
        CHECK(ends[0].at("pid") != ends[1].at("pid"));
        CHECK(ends[0].at("ts").get<double>() <= ends[1].at("ts").get<double>());
        if (view.total() < 200) {
          CHECK(inside_one(ends[0]));
          CHECK(inside_one(ends[1]));
        }
      }
    });
  }

  TEST_CASE("streams have their own tracks, and what overlaps on a stream gets a further one") {
    show::picture p;
    p.title = "measured";
    p.size = {2, 2, 1};
    p.stages = 2;
    p.rows = 2;
    p.microseconds = 1e6;
    p.unit = "s";
    p.boxes = {
        {0, 0, 1, make_action(kind::forward, 0, 0), 0, 0},         {0, 1, 2, make_action(kind::forward, 0, 1), 0, 0},
        {0, 1, 3, make_action(kind::send_forward, 0, 0), 0, 0},    {0, 2, 4, make_action(kind::send_forward, 0, 1), 0, 0},
        {1, 0, 3, make_action(kind::receive_forward, 1, 0), 0, 0}, {1, 3, 4, make_action(kind::receive_forward, 1, 1), 0, 0},
        {1, 3, 4, make_action(kind::forward, 1, 0), 0, 0},         {1, 4, 5, make_action(kind::forward, 1, 1), 0, 0},
        {1, 5, 6, make_action(kind::optimizer_step, 0, 0), 0, 0}};
    show::picture other = p;
    other.title = "predicted";
    show::picture const both[] = {other, p};
    json const trace = json::parse(show::chrome_trace(both));
    std::map<std::pair<int, int>, std::vector<std::pair<double, double>>> tracks;
    std::map<std::pair<int, int>, std::string> names;
    std::set<std::string> processes;
    int flows = 0;
    for (json const& e : trace.at("traceEvents")) {
      std::pair<int, int> const track{e.at("pid"), e.value("tid", -1)};
      if (e.at("ph") == "X") tracks[track].push_back({e.at("ts"), e.at("ts").get<double>() + e.at("dur").get<double>()});
      if (e.at("name") == "thread_name") names[track] = e.at("args").at("name");
      if (e.at("name") == "process_name") processes.insert(e.at("args").at("name").get<std::string>());
      if (e.at("ph") == "s") {
        ++flows;
        CHECK(names[track].starts_with("send"));
      }
      if (e.at("ph") == "f") CHECK(names[track].starts_with("receive"));
    }
    CHECK(flows == 4);
    CHECK(processes == std::set<std::string>{"rank 0, predicted", "rank 1, predicted", "rank 0, measured", "rank 1, measured"});
    for (auto& [track, slices] : tracks) {
      CHECK(names.count(track) == 1);
      std::sort(slices.begin(), slices.end());
      for (std::size_t i = 1; i < slices.size(); ++i) CHECK(slices[i].first >= slices[i - 1].second);
    }
    CHECK(names[{2, 1}] == "send");
    CHECK(names[{2, 6}] == "send 2");  // the second send starts while the first is under way
    CHECK(tracks[{2, 0}].back().second == 2e6);
  }
}

TEST_SUITE("show program") {
  TEST_CASE("every instruction is one line under its rank, with its peer") {
    show_test::for_each_plan([](plan const& p) {
      owned_program const made = lower(prove(p)).copy();
      program_view const view = made;
      std::vector<std::string> const lines = split(show::program_text(view), '\n');
      std::size_t at = 0;
      for (int r = 0; r < p.size.ranks; ++r) {
        REQUIRE(lines[at].starts_with("rank " + std::to_string(r) + ": " + std::to_string(view.length(r)) + " instructions"));
        ++at;
        for (int i = 0; i < view.length(r); ++i, ++at) {
          instruction const& one = view.at(r, i);
          std::string const line = lines[at] + " ";
          CHECK(line.find(" " + std::to_string(i) + "  " + to_text(one.op).str() + " ") != std::string::npos);
          bool const sends = one.op.kind == kind::send_forward || one.op.kind == kind::send_backward;
          if (sends) CHECK(line.find("to rank " + std::to_string(one.peer) + " ") != std::string::npos);
        }
        ++at;  // the empty line between ranks
      }
    });
  }
}

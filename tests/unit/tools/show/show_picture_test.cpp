#include <cmath>
#include <string>

#include <doctest/doctest.h>

#include <chevron/tools/show/html.hpp>
#include <chevron/tools/show/picture.hpp>
#include <chevron/tools/show/svg.hpp>

#include "show_support.hpp"

using namespace chevron;
using show_test::element;
using show_test::plan_from;

namespace {

/// The picture of a small measured step: computations, messages, a sum of gradients and the optimizer.
show::picture recorded() {
  show::picture p;
  p.title = "measured <&\"'>";
  p.schedule = "GPipe";
  p.size = {2, 1, 1};
  p.stages = 2;
  p.rows = 2;
  p.unit = "ms";
  auto const add = [&](int rank, double start, double end, kind what, int stage) {
    p.boxes.push_back({rank, start, end, make_action(what, stage, 0), 0, 3});
  };
  add(0, 10, 11, kind::forward, 0);
  add(0, 11, 12, kind::send_forward, 0);
  add(1, 9, 12.5, kind::receive_forward, 1);
  add(1, 12.5, 14, kind::forward, 1);
  add(1, 14, 16, kind::backward, 1);
  add(1, 16, 17, kind::send_backward, 1);
  add(0, 16, 17.25, kind::receive_backward, 0);
  add(0, 17.25, 19, kind::backward, 0);
  add(0, 19, 20, kind::reduce_gradients, 0);
  add(0, 20, 20.5, kind::optimizer_step, 0);
  return p;
}

double attribute(element const& e, char const* name) {
  REQUIRE_FALSE(e[name].empty());
  return std::stod(e[name]);
}

int count_of(std::vector<element> const& all, char const* name, char const* css_class) {
  int n = 0;
  for (element const& e : all) n += e.name == name && e["class"] == css_class ? 1 : 0;
  return n;
}

/// The drawing of a small step, predicted and measured.
std::string predicted_above_recorded() {
  show::picture predicted = show::picture_of(plan_from({"0F0 0B0", "1F0 1B0"}, {0, 1}, 1, "GPipe"), costs{1, 1, 1, 0});
  predicted.title = "predicted";
  show::picture const pictures[] = {predicted, recorded()};
  return show::svg(pictures);
}

}  // namespace

TEST_SUITE("show picture") {
  TEST_CASE("a plan's picture has the numbers of the analyses") {
    show_test::for_each_plan([](plan const& p) {
      CAPTURE(p.name);
      for (costs const& cost : {costs{1, 1, 1, 0}, costs{1, 1.5, 0.5, 0.25}}) {
        show::figures const drawn = figures_of(show::picture_of(p, cost));
        show::figures const proved = show::figures_of(p, cost);
        CHECK(drawn.makespan == doctest::Approx(makespan(p, cost)));
        CHECK(drawn.span == doctest::Approx(span(p, cost)));
        CHECK(drawn.bubble_makespan == doctest::Approx(bubble_makespan(p, cost)));
        CHECK(drawn.bubble_span == doctest::Approx(bubble_span(p, cost)));
        CHECK(drawn.peak_in_flight == proved.peak_in_flight);
        CHECK(drawn.messages == messages(p));
        CHECK(proved.messages == messages(p));
        for (int r = 0; r < p.size.ranks; ++r) CHECK(proved.peak_in_flight[static_cast<std::size_t>(r)] == peak_in_flight(p, r));
      }
    });
  }

  TEST_CASE("a recorded step is measured by its compute alone, from its first start") {
    show::figures const f = figures_of(recorded());
    CHECK(f.makespan == doctest::Approx(9));  // 10 to 19
    CHECK(f.span == doctest::Approx(9));      // rank 0
    CHECK(f.busy[0] == doctest::Approx(2.75));
    CHECK(f.busy[1] == doctest::Approx(3.5));
    CHECK(f.bubble_makespan == doctest::Approx(1 - 6.25 / 18));
    CHECK(f.peak_in_flight == std::vector<int>{1, 1});
    CHECK(f.messages == 2);
  }

  TEST_CASE("messages stay within a step; another unit") {
    show::picture all = recorded();
    for (show::box b : recorded().boxes) {
      b.step = 4;
      b.start += 100;
      b.end += 100;
      all.boxes.push_back(b);
    }
    CHECK(messages_of(all).size() == 4);  // none across steps
    show::picture const seconds = show::scaled(recorded(), 0.001, "s");
    CHECK(figures_of(seconds).makespan == doctest::Approx(0.009));
    CHECK(seconds.microseconds == doctest::Approx(recorded().microseconds * 1000));
  }

  TEST_CASE("messages lead from SEND to RECV where those were recorded, and stay within a replica") {
    show::picture p = recorded();
    p.rows = 4;
    for (show::box b : recorded().boxes) {
      b.rank += 2;
      p.boxes.push_back(b);
    }
    std::vector<show::message> const found = messages_of(p);
    REQUIRE(found.size() == 4);
    for (show::message const& m : found) {
      show::box const& from = p.boxes[static_cast<std::size_t>(m.from)];
      show::box const& to = p.boxes[static_cast<std::size_t>(m.to)];
      CHECK(from.rank / 2 == to.rank / 2);
      CHECK(from.rank != to.rank);
      bool const forward = from.op.kind == kind::send_forward;
      CHECK((forward || from.op.kind == kind::send_backward));
      CHECK(to.op.kind == (forward ? kind::receive_forward : kind::receive_backward));
    }
  }
}

TEST_SUITE("show svg") {
  TEST_CASE("a pair is one box in two colours, each half with its number") {
    plan const p = plan_from({"0F0 0F1 (0F2;0B0) (0F3;0B1) 0B2 0B3", "1F0 (1F1;1B0) (1F2;1B1) (1F3;1B2) 1B3"}, {0, 1}, 4);
    show::picture const drawn = show::picture_of(p, costs{.hidden = 0.5});
    CHECK(figures_of(drawn).busy == std::vector<double>{10 + 1, 10.5});
    CHECK(figures_of(drawn).makespan == makespan(p, costs{.hidden = 0.5}));
    std::string error;
    std::vector<element> const all = show_test::read_xml(show::svg(drawn), error);
    CHECK(error == "");
    std::vector<element> boxes;
    for (element const& e : all) {
      if (e["class"] == "compute") boxes.push_back(e);
    }
    REQUIRE(boxes.size() == 16);
    element const& whole = boxes[0];
    element const& upper = boxes[2];
    element const& lower = boxes[3];
    CHECK(upper["x"] == lower["x"]);
    CHECK(upper["width"] == lower["width"]);
    CHECK(upper["fill"] == whole["fill"]);
    CHECK(lower["fill"] != upper["fill"]);
    CHECK(attribute(upper, "y") == attribute(whole, "y"));
    CHECK(attribute(upper, "y") + attribute(upper, "height") == attribute(lower, "y"));
    CHECK(attribute(upper, "height") + attribute(lower, "height") == attribute(whole, "height"));
    CHECK(show::svg(drawn).find("a pair, run as one") != std::string::npos);
  }

  TEST_CASE("of a run that failed: what was done, what was under way, who waited for what") {
    plan const p = plan_from({"0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"}, {0, 1}, 2);
    show::picture drawn = show::picture_of(p, costs{});
    std::string const whole = show::svg(drawn);
    CHECK(whole.find("class=\"progress\"") == std::string::npos);
    auto const box_of = [&](char const* name) {
      for (std::size_t i = 0; i < drawn.boxes.size(); ++i) {
        if (to_text(drawn.boxes[i].op).view() == name) return i;
      }
      return drawn.boxes.size();
    };
    for (show::box& b : drawn.boxes) b.so_far = show::progress::not_begun;
    for (char const* done : {"0F0", "0F1"}) drawn.boxes[box_of(done)].so_far = show::progress::done;
    drawn.boxes[box_of("1F0")].so_far = show::progress::under_way;
    drawn.boxes[box_of("0B0")].so_far = show::progress::waiting;
    drawn.note = "All waited & wondered";
    drawn.row_notes = {"waited <1 s", "is where all waited for it"};
    drawn.waits = {{static_cast<int>(box_of("0B0")), static_cast<int>(box_of("1B0"))}};
    drawn.awaited = static_cast<int>(box_of("1F0"));
    drawn.first_rank = 6;
    std::string error;
    std::string const text = show::svg(drawn);
    std::vector<element> const all = show_test::read_xml(text, error);
    CHECK(error == "");
    int compute = 0, faint = 0, awaited = 0, dashed = 0, circles = 0;
    double right = 0;
    for (element const& e : all) {
      compute += e["class"] == "compute" ? 1 : 0;
      faint += e["class"] == "compute" && e["fill-opacity"] == "0.24" ? 1 : 0;
      awaited += e["class"] == "awaited" ? 1 : 0;
      dashed += e.name == "rect" && e["stroke-dasharray"] != "" ? 1 : 0;
      circles += e.name == "circle" ? 1 : 0;
      if (e["class"] == "compute") right = std::max(right, attribute(e, "x") + attribute(e, "width"));
    }
    CHECK(compute == 8);
    CHECK(faint == 5);  // one of them waited
    CHECK(awaited == 1);
    CHECK(dashed == 2);  // with the legend's
    CHECK(circles == 1);
    CHECK(right < 850);  // leaves room for remarks on ranks
    for (char const* words : {"All waited &amp; wondered", "waited &lt;1 s", ">rank 6<", ">rank 7<", "never begun"}) {
      CAPTURE(words);
      CHECK(text.find(words) != std::string::npos);
    }
    CHECK(text.find("makespan") == std::string::npos);
  }

  TEST_CASE("the critical path is one line, from the first start to the last end, where it is asked for") {
    show_test::for_each_plan([](plan const& p) {
      costs const cost{1, 1.5, 0.5, 0.25};
      CHECK(show::svg(p, cost).find("polyline") == std::string::npos);
      std::string error;
      std::vector<element> const all = show_test::read_xml(show::svg(p, cost, {.critical_path = true}), error);
      CHECK(error == "");
      int lines = 0;
      double const right = 1000 - 24;
      for (element const& e : all) {
        if (e.name != "polyline") continue;
        ++lines;
        std::vector<double> x;
        for (std::string const& point : show_test::split(e["points"], ' ')) x.push_back(std::stod(point));
        CHECK(x.size() == 2 * show::picture_of(p, cost).critical_path.size());
        CHECK(std::is_sorted(x.begin(), x.end()));
        CHECK(x.front() == doctest::Approx(72));
        CHECK(x.back() == doctest::Approx(right));
      }
      CHECK(lines == 1);
    });
  }

  TEST_CASE("steps back to back: microbatches from 0 in each, a mark where a rank begins the next") {
    plan const p = expand(catalogue::zb_h2, shape{4, 8, 0});
    show::picture const three = show::picture_of_steps(p, costs{}, 3);
    CHECK(figures_of(three).makespan == 27 + 24 + 24);
    CHECK(size_words(three) == "4 ranks, 8 microbatches, 3 steps");
    CHECK(three.boxes.size() == static_cast<std::size_t>(3 * p.actions.count));
    CHECK(messages_of(three).size() == static_cast<std::size_t>(3 * messages(p)));
    for (show::box const& b : three.boxes) CHECK(b.op.micro_batch < 8);
    std::string error;
    std::vector<element> const all = show_test::read_xml(show::svg(three), error);
    CHECK(error == "");
    CHECK(count_of(all, "line", "step") == 2 * 4);
  }

  TEST_CASE("transfers that occupy ranks are drawn below them, as long as they take, never during a computation") {
    show_test::for_each_plan([](plan const& p) {
      if (p.size.ranks == 1) return;
      for (occupies const who : {occupies::sender, occupies::receiver, occupies::both}) {
        show::picture const drawn = show::picture_of(p, costs{.communication = 0.25, .communication_occupies = who});
        std::vector<std::vector<std::pair<double, double>>> rows(static_cast<std::size_t>(p.size.ranks));
        int transfers = 0;
        for (show::box const& b : drawn.boxes) {
          transfers += is_compute(b.op.kind) ? 0 : 1;
          if (!is_compute(b.op.kind)) CHECK(b.end - b.start == doctest::Approx(0.25));
          if (b.of_pair != show::half::second) rows[static_cast<std::size_t>(b.rank)].push_back({b.start, b.end});
        }
        CHECK(transfers == messages(p) * (who == occupies::both ? 2 : 1));
        bool apart = true;
        for (auto& row : rows) {
          std::sort(row.begin(), row.end());
          for (std::size_t i = 1; i < row.size(); ++i) apart = apart && row[i].first >= row[i - 1].second - 1e-9;
        }
        CHECK(apart);
      }
    });
  }

  TEST_CASE("well-formed, a rectangle an action, inside the sheet, and none over another") {
    show_test::for_each_plan([](plan const& p) {
      CAPTURE(p.name);
      CAPTURE(p.size.ranks);
      std::string error;
      std::vector<element> const all = show_test::read_xml(show::svg(p, costs{1, 1.5, 0.5, 0.25}), error);
      CHECK(error == "");
      REQUIRE(all.size() > 1);
      CHECK(all[0].name == "svg");
      plan_view const view = p;
      CHECK(count_of(all, "rect", "compute") == view.total());
      double const width = attribute(all[0], "width");
      double const height = attribute(all[0], "height");
      CHECK(all[0]["viewBox"] == "0 0 " + all[0]["width"] + " " + all[0]["height"]);
      std::vector<std::array<double, 3>> boxes;  // y, left, right
      bool inside = true;
      for (element const& e : all) {
        if (e.name == "text")
          inside = inside && attribute(e, "x") >= 0 && attribute(e, "x") <= width && attribute(e, "y") <= height;
        if (e.name != "rect" || e["class"] == "sheet") continue;
        double const x = attribute(e, "x"), y = attribute(e, "y"), w = attribute(e, "width"), h = attribute(e, "height");
        inside = inside && x >= 0 && y >= 0 && w >= 0 && x + w <= width && y + h <= height;
        if (e["class"] == "compute") boxes.push_back({y, x, x + w});
      }
      CHECK(inside);
      std::sort(boxes.begin(), boxes.end());
      bool apart = true;
      for (std::size_t i = 1; i < boxes.size(); ++i)
        apart = apart && (boxes[i][0] != boxes[i - 1][0] || boxes[i][1] >= boxes[i - 1][2] - 0.011);
      CHECK(apart);
    });
  }

  TEST_CASE("the title names makespan, span and bubble") {
    plan const p = expand(catalogue::zb_v, shape{4, 8, 0});
    std::string const drawing = show::svg(p, costs{});
    CHECK(drawing.find("makespan 51, bubble 5.9 %") != std::string::npos);
    CHECK(drawing.find("span 48, bubble 0.0 %") != std::string::npos);
    CHECK(drawing.find("ZBVZeroBubble") != std::string::npos);
    CHECK(drawing.find("8 on every rank") != std::string::npos);
  }

  TEST_CASE("prediction above measurement on one axis, other work thinner and below its row") {
    std::string error;
    std::vector<element> const all = show_test::read_xml(predicted_above_recorded(), error);
    CHECK(error == "");
    CHECK(count_of(all, "rect", "compute") == 8);
    CHECK(count_of(all, "rect", "other") == 6);
    std::vector<element> compute, other;
    for (element const& e : all) {
      if (e["class"] == "compute") compute.push_back(e);
      if (e["class"] == "other") other.push_back(e);
    }
    // One axis: a unit is as wide above as below. First forward of each: 1 unit against 1 ms.
    CHECK(attribute(compute[0], "width") == doctest::Approx(attribute(compute[4], "width")).epsilon(0.001));
    CHECK(attribute(compute[0], "x") == attribute(compute[4], "x"));
    CHECK(attribute(compute[4], "y") > attribute(compute[3], "y"));
    for (element const& e : other) CHECK(attribute(e, "height") < attribute(compute[0], "height") / 3);
    // rank 0's send lies below rank 0's row and above rank 1's.
    CHECK(attribute(other[0], "y") >= attribute(compute[4], "y") + attribute(compute[4], "height"));
    CHECK(attribute(other[0], "y") < attribute(compute[5], "y"));
  }

  TEST_CASE("gridlines stay among the rows: no line goes through a title") {
    std::string error;
    std::vector<element> const all = show_test::read_xml(predicted_above_recorded(), error);
    std::vector<double> titles;
    for (element const& e : all) {
      if (e.name == "text" && e["font-weight"] == "600" && e["font-size"].empty()) titles.push_back(attribute(e, "y"));
    }
    REQUIRE(titles.size() == 2);
    int lines = 0;
    for (element const& e : all) {
      if (e.name != "line" || !e["stroke-dasharray"].empty()) continue;
      ++lines;
      for (double const y : titles) CHECK((attribute(e, "y1") > y || attribute(e, "y2") < y - 11));
    }
    CHECK(lines >= 8);
  }

  TEST_CASE("names with markup are text, not markup") {
    show::picture p = recorded();
    p.schedule = "<script>alert('&')</script> \x01 \xff";
    for (std::string const& page : {show::svg(p)}) {
      std::string error;
      show_test::read_xml(page, error);
      CHECK(error == "");
      CHECK(page.find("<script") == std::string::npos);
      CHECK(page.find('\x01') == std::string::npos);
      CHECK(page.find('\xff') == std::string::npos);
    }
    // The scripts are the page's own: its model and the viewer.
    std::string const page = show::html(p);
    std::size_t scripts = 0;
    for (std::size_t at = page.find("<script"); at != std::string::npos; at = page.find("<script", at + 1)) ++scripts;
    CHECK(scripts == 2);
    CHECK(page.find("<script>alert") == std::string::npos);
  }

  TEST_CASE("an empty picture is still a drawing") {
    std::string error;
    show_test::read_xml(show::svg(show::picture{}), error);
    CHECK(error == "");
    show_test::read_xml(show::svg(std::span<show::picture const>{}), error);
    CHECK(error == "");
  }
}

namespace {

/// A page's model, read by code that is independent of the writer.
struct read_box {
  int kind, half, stage, chunk, step;
  long micro_batch, start, end;
};

struct model_reader {
  std::string text;
  std::size_t at = 0;
  bool done() const { return at >= text.size(); }
  long next() {
    std::string const letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    long value = 0;
    for (int shift = 0;; shift += 5) {
      long const digit = static_cast<long>(letters.find(text.at(at++)));
      value |= (digit & 31) << shift;
      if (digit < 32) return value;
    }
  }
  long next_signed() {
    long const value = next();
    return value % 2 != 0 ? -(value / 2) - 1 : value / 2;
  }
};

std::vector<std::vector<read_box>> rows_of(std::string const& model) {
  std::vector<std::vector<read_box>> out;
  std::size_t at = model.find("\"lists\":[") + 9;
  while (model[at] != ']') {
    std::string parts[2];
    for (std::string& part : parts) {
      std::size_t const from = model.find('"', at) + 1;
      at = model.find('"', from);
      part = model.substr(from, at - from);
      ++at;
    }
    ++at;  // the bracket
    if (model[at] == ',') ++at;
    std::vector<read_box> works, row;
    for (model_reader r{parts[0]}; !r.done();) {
      read_box w{};
      for (int* value : {&w.kind, &w.half, &w.stage, &w.chunk, &w.step}) *value = static_cast<int>(r.next());
      w.micro_batch = -1;
      works.push_back(w);
    }
    long begin = 0, end = 0;
    for (model_reader r{parts[1]}; !r.done();) {
      long const token = r.next();
      read_box& w = works.at(static_cast<std::size_t>(token / 2));
      long const length = w.end - w.start;
      long const skipped = token % 2 != 0 ? r.next_signed() : 0;
      long const wait = token % 2 != 0 ? r.next_signed() : 0;
      long const longer = token % 2 != 0 ? r.next_signed() : 0;
      w.micro_batch += 1 + skipped;
      w.start = begin = (w.half == 2 ? begin : end) + wait;
      w.end = end = begin + length + longer;
      row.push_back(w);
    }
    out.push_back(row);
  }
  return out;
}

}  // namespace

TEST_SUITE("show html") {
  TEST_CASE("one page with every action in its time, the numbers, and nothing from elsewhere") {
    show_test::for_each_plan([](plan const& p) {
      costs const each{1, 1.5, 0.5, 0.25};
      std::string const page = show::html(p, each);
      CHECK(page.starts_with("<!doctype html>"));
      for (char const* outside : {"src=", "href=", "url(", "@import", "<link", "http:", "https:", "fetch("})
        CHECK(page.find(outside) == std::string::npos);
      plan_view const view = p;
      timeline const when = simulate(view, each);
      std::size_t const from = page.find("id=\"model\">");
      std::string const model = page.substr(from, page.find("</script>", from) - from);
      double const tick = std::stod(model.substr(model.find("\"tick\":") + 7));
      auto const rows = rows_of(model);
      REQUIRE(rows.size() == static_cast<std::size_t>(view.size.ranks));
      bool same = true;
      for (int r = 0; r < view.size.ranks; ++r) {
        auto const& row = rows[static_cast<std::size_t>(r)];
        REQUIRE(row.size() == static_cast<std::size_t>(view.length(r)));
        for (std::size_t k = 0; k < row.size(); ++k) {
          int const i = view.begin[r] + static_cast<int>(k);
          action const a = view.actions[i];
          int const stage = static_cast<int>(a.stage);
          same = same && row[k].kind == static_cast<int>(a.kind) && row[k].stage == stage &&
                 row[k].chunk == view.chunk_of(stage) && row[k].micro_batch == static_cast<long>(a.micro_batch);
          same = same && std::abs(static_cast<double>(row[k].start) * tick - when.start.data[i]) <= tick &&
                 std::abs(static_cast<double>(row[k].end) * tick - when.end.data[i]) <= tick;
        }
      }
      CHECK(same);
      // The critical path, as numbers of boxes.
      std::size_t const path_at = model.find("\"path\":\"") + 8;
      std::vector<long> path;
      long now = 0;
      model_reader steps{model.substr(path_at, model.find('"', path_at) - path_at)};
      while (!steps.done()) path.push_back(now += steps.next_signed());
      std::vector<long> wanted;
      for (path_step const& step : critical_path_of(view, each, when)) wanted.push_back(step.action);
      CHECK(path == wanted);
    });
  }

  TEST_CASE("other work and waits of a measured picture are there, too") {
    auto const rows = rows_of(show::html_model(std::vector{recorded()}));
    REQUIRE(rows.size() == 2);
    std::size_t boxes = 0;
    for (auto const& row : rows) boxes += row.size();
    CHECK(boxes == recorded().boxes.size());
    CHECK(rows[1][0].kind == static_cast<int>(kind::receive_forward));
    CHECK(rows[1][0].start < 0);
  }

  TEST_CASE("under 1 MB at 64 ranks and 256 microbatches, under every schedule and with uneven costs") {
    catalogue::for_each([](auto const& one) {
      CAPTURE(one.name);
      plan const p = expand(one, shape{64, 256, 0});
      REQUIRE(!p.problem);
      std::vector<double> forward, input, weight, message;
      for (int s = 0; s < p.stages; ++s) {
        forward.push_back(1 + 0.0137 * (s * 7 % 11));
        input.push_back(1.2 + 0.0191 * (s * 5 % 13));
        weight.push_back(0.8 + 0.0073 * (s * 3 % 7));
        message.push_back(0.05 + 0.0011 * (s % 5));
      }
      cost_view const each{forward.data(), input.data(), weight.data(), 1, message.data(), 1, 0, occupies::nobody, false};
      CHECK(show::html(p, each).size() < 1'000'000);
    });
  }

  TEST_CASE("an empty picture is still a page") {
    CHECK(show::html(show::picture{}).ends_with("</html>\n"));
    CHECK(show::html(std::span<show::picture const>{}).ends_with("</html>\n"));
  }

  TEST_CASE("texts are cut between characters, not inside of one") {
    std::string const words = "a naïve → größte Überschrift";
    for (double width = 0; width < 250; width += 1) {
      std::string const cut = show::detail::fitting(words, 12, width);
      CHECK((cut == words || cut.ends_with("…")));
      CHECK((show::detail::text_width(cut, 12) <= width || cut == "…"));
      for (std::string_view rest = cut; !rest.empty();) {
        int const length = show::utf8_length(rest);
        REQUIRE(length > 0);
        rest.remove_prefix(static_cast<std::size_t>(length));
      }
    }
    CHECK(show::detail::fitting(words, 12, 1000) == words);
  }
}

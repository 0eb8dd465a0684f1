#include "generate.hpp"

#include <string>
#include <vector>

#include "limits.hpp"
#include "model.hpp"
#include "plans.hpp"

namespace differential {

namespace {

using kind = flow::kind;

std::vector<int> const widths{4, 6, 8, 8, 16, 24};

struct choice {
  int weight;
  block what;
};

block pick(dice& d, std::vector<choice> const& from) {
  int sum = 0;
  for (choice const& c : from) sum += c.weight;
  int at = d.below(sum);
  for (choice const& c : from) {
    if ((at -= c.weight) < 0) return c.what;
  }
  return from.back().what;
}

/// \param experts are there experts over replicas? \param faulty may a block of cut layers have a fault?
block draw_block(dice& d, flow const& f, bool alone, bool sliced, bool experts, bool shards, bool faulty) {
  int const wide = d.of(widths);
  if (f.what == kind::tokens) {
    std::set<std::string> const sparse = d.one_in(25) ? std::set<std::string>{"sparse"} : std::set<std::string>{};
    return pick(d, {{6, {"emb", {wide, 10}, sparse}}, {3, {"bag", {wide, 10}, sparse}}});
  }
  std::vector<choice> from{{4, {"tanh"}}, {2, {"gelu"}},       {2, {"sig"}},  {1, {"relu_"}}, {1, {"add_"}},
                           {1, {"mul_"}}, {4, {"drop", {30}}}, {1, {"dbl2"}}, {1, {"gaps"}},  {1, {"cols"}},
                           {1, {"sort"}}, {1, {"part_"}},      {1, {"soft"}}, {1, {"noise"}}};
  auto const add = [&](int weight, block const& b) { from.push_back({weight, b}); };
  add(2, {"tally"});
  add(3, {"aux", {}, d.one_in(3) ? std::set<std::string>{"own"} : std::set<std::string>{}});
  if (!alone && f.others < 3) {
    for (char const* name : {"push", "pushc", "pushv", "pushn", "int", "bool", "undef", "empty", "expd", "cx", "dbl", "det"})
      add(1, {name});
    if (f.others < 2) add(1, {"max"});
  }
  if (f.others > 0) {
    add(8, {"pop"});
    add(2, {"del"});
  }
  switch (f.what) {
    case kind::vector:
      add(12, {"lin", {wide}});
      add(4, {"bn"});
      if (d.one_in(3)) add(4, {"bn", {}, {"eval"}});
      add(3, {"ln"});
      if (f.width % 2 == 0) add(2, {"gn"});
      add(3, {"rep", {d.between(2, 4)}});
      add(2, {"rep", {d.between(2, 4)}, {"scaled"}});
      add(2, {"img", {d.of(std::vector<int>{2, 4, 8}), d.between(2, 4)}});
      break;
    case kind::sequence:
      add(8, {"lin", {wide}});
      add(5, {"lstm", {wide, d.one_in(3) ? 2 : 1}, d.one_in(4) ? std::set<std::string>{"bi"} : std::set<std::string>{}});
      add(4, {"gru", {wide, d.one_in(3) ? 2 : 1}, d.one_in(4) ? std::set<std::string>{"bi"} : std::set<std::string>{}});
      add(3, {"mha", {2}});
      add(3, {"enc", {2, d.one_in(2) ? 20 : 0}});
      add(3, {"ln"});
      add(6, {"tr"});
      add(1, {"viewt"});
      add(2, {"last"});
      add(2, {"avg"});
      break;
    case kind::channels:
      add(8, {"conv1", {wide, d.one_in(2) ? 3 : 1}});
      add(3, {"bn"});
      if (d.one_in(3)) add(3, {"bn", {}, {"eval"}});
      if (f.width % 2 == 0) add(2, {"gn"});
      add(2, {"in", {}, d.one_in(2) ? std::set<std::string>{"track"} : std::set<std::string>{}});
      add(5, {"tr"});
      add(2, {"mean"});
      break;
    case kind::image:
      add(8, {"conv2",
              {d.of(std::vector<int>{4, 8, 16}), d.one_in(2) ? 3 : 1},
              d.one_in(3) ? std::set<std::string>{"cl"} : std::set<std::string>{}});
      add(3, {"bn"});
      if (d.one_in(3)) add(3, {"bn", {}, {"eval"}});
      if (f.width % 2 == 0) add(2, {"gn"});
      add(2, {"in", {}, d.one_in(2) ? std::set<std::string>{"track"} : std::set<std::string>{}});
      add(4, {"cl"});
      add(1, {"cont"});
      add(3, {"flat"});
      add(2, {"mean"});
      break;
    case kind::tokens:
      break;
  }
  if (sliced && (f.what == kind::vector || f.what == kind::sequence)) {
    std::set<std::string> const cut = d.one_in(4) ? std::set<std::string>{"det"} : std::set<std::string>{};
    if (f.what == kind::sequence) add(20, {"att", {}, cut});
    add(12, {"mem", {}, cut});
  }
  if (f.what == kind::vector || f.what == kind::sequence) {
    for (char const* name : {"lin3", "res", "fn2", "buf", "pen", "idle", "eff", "hook"}) add(2, {name});
    add(1, {"buf", {}, {"felt"}});
    add(1, {"eff", {}, {"turn"}});
    add(1, {"fn2", {}, {"both"}});
    add(1, {"cplx"});
    if (shards) {
      std::set<std::string> flags;
      if (d.one_in(2)) flags.insert("fused");
      if (faulty && d.one_in(2))
        flags.insert(d.of(std::vector<std::string>{"nocopy", "nocopy", "nocut", "nowhole", "wrongdim", "wrongtwice"}));
      add(24, {"tp", {d.of(std::vector<int>{4, 6, 8})}, flags});
    }
    if (experts) add(14, {"moe", {}, d.one_in(2) ? std::set<std::string>{"count"} : std::set<std::string>{}});
    if (f.width % 2 == 0 && f.width > 2 && !alone) add(1, {"split"});
    if (f.width % 2 == 0 && f.width > 2) add(1, {"half"});
  }
  return pick(d, from);
}

void draw_model(dice& d, program& p, int stages) {
  int const what = d.below(10);
  if (p.slices() > 1) {
    std::string const tokens = d.one_in(2) ? "4" : "8";
    p.options["in"] = what < 5 ? "tok:" + tokens + ":10" : "seq:" + tokens + ":" + std::to_string(d.of(widths));
  } else if (what < 3) {
    p.options["in"] = "tok:" + std::to_string(d.between(2, 5)) + ":10";
  } else if (what < 5) {
    p.options["in"] = "seq:" + std::to_string(d.between(2, 5)) + ":" + std::to_string(d.of(widths));
  } else if (what < 7) {
    p.options["in"] = "img:" + std::to_string(d.of(std::vector<int>{2, 4, 8})) + ":" + std::to_string(d.between(2, 5));
    if (d.one_in(3)) p.options["cl"] = "1";
  } else {
    p.options["in"] = "vec:" + std::to_string(d.of(widths));
  }
  bool const strange = d.one_in(2);  // else one tensor flows from stage to stage
  flow f = flow_of_input(p);
  for (int s = 0; s < stages; ++s) {
    stage_text made;
    std::string const form = d.of(std::vector<std::string>{"mod", "mod", "mod", "seq", "call", "both", "parts", "parts"});
    made.form = {form};
    bool const alone = form == "seq" || !strange;
    int const count = stages > 4 ? d.between(1, 2) : d.between(1, 4);
    for (int i = 0; i < count; ++i) {
      for (int tries = 0; tries < 50; ++tries) {
        block b = draw_block(d, f, alone, p.slices() > 1 && form != "seq", p.expert_replicas() > 1, p.has("tp"), p.has("faulty"));
        try {
          flow const next = flow_after(f, b);
          if (form == "seq" && (next.others > 0 || f.others > 0)) {
            if (b.name != "pop" && b.name != "del") continue;
          }
          if (learns(b) && b.name != "tp" && d.one_in(10)) b.flags.insert("frozen");
          if (form == "parts" && d.one_in(3)) b.flags.insert("rc");
          f = next;
          made.blocks.push_back(b);
          break;
        } catch (meaningless const&) {
        }
      }
    }
    if (form == "seq" && f.others > 0) made.form = {"mod"};
    if (form != "parts" && d.one_in(5)) made.form.flags.insert("rc");
    if (d.one_in(10)) made.form.flags.insert("eval");
    p.stages.push_back(made);
  }
  // A Sequential takes and gives one tensor.
  flow at = flow_of_input(p);
  for (stage_text& s : p.stages) {
    bool several = at.others > 0;
    for (block const& b : s.blocks) {
      at = flow_after(at, b);
      several = several || at.others > 0;
    }
    if (several && s.form.name == "seq") s.form.name = "mod";
  }
  // An encoder that is not trained.
  if (stages > 1 && d.one_in(6)) {
    int const trained = d.between(1, stages - 1);
    for (int s = 0; s < trained; ++s) {
      for (block& b : p.stages[static_cast<std::size_t>(s)].blocks) {
        if (learns(b)) b.flags.insert("frozen");
      }
    }
  }
  // One parameter of two stages: both get a layer of one shape at their end.
  if (stages > 1 && d.one_in(6) && (f.what == kind::vector || f.what == kind::sequence)) {
    int const a = d.below(stages - 1);
    flow here = flow_of_input(p);
    for (int s = 0; s <= a; ++s) {
      for (block const& b : p.stages[static_cast<std::size_t>(s)].blocks) here = flow_after(here, b);
    }
    if (here.what == kind::vector || here.what == kind::sequence) {
      // lin:W+tie keeps the width; the second one needs the same width before it.
      p.stages[static_cast<std::size_t>(a)].blocks.push_back({"lin", {here.width}, {"tie1"}});
      p.stages.back().blocks.push_back({"lin", {here.width}});
      p.stages.back().blocks.push_back({"lin", {here.width}, {"tie1"}});
    }
  }
}

void draw_options(dice& d, program& p) {
  p.options["steps"] = std::to_string(d.between(2, 4));
  p.options["opt"] = d.of(std::vector<std::string>{"sgd", "mom", "adamw"});
  int const m = p.micro_batches();
  p.options["n"] = std::to_string(d.one_in(4) ? d.between(m, 2 * m) : d.between(2 * m, 4 * m));
  if (d.one_in(3)) p.options["vary"] = "1";
  if (d.one_in(6)) {
    p.options["cut"] = "own";
    if (p.get("in").starts_with("tok") && p.slices() == 1 && d.one_in(2)) p.options["long"] = "1";
  }
  if (d.one_in(8))
    p.options["dtype"] = "f64";
  else if (d.one_in(8)) {
    p.options["dtype"] = "bf16";
    if (d.one_in(2)) p.options["masters"] = "1";
  } else if (d.one_in(6))
    p.options["cast"] = "bf16";
  if (d.one_in(3)) p.options["clip"] = d.of(std::vector<std::string>{"0.01", "0.1", "0.5", "2"});
  if (d.one_in(4)) p.options["pv"] = std::to_string(d.below(3));
  if (d.one_in(5)) p.options["acc"] = std::to_string(d.between(2, 3));
  if (p.expert_replicas() == 1 && d.one_in(4)) p.options["rep"] = std::to_string(d.between(2, 3));
  if (p.has("rep") && d.one_in(2)) p.options["shard"] = d.one_in(2) ? "gradients" : "optimizer";
  if (p.has("shard") && d.one_in(2)) p.options["late"] = "1";
  if (d.one_in(6)) p.options["weigh"] = "1";
  if (d.one_in(5) && p.slices() == 1) p.options["side"] = "1";
  if (d.one_in(2)) p.options["eval"] = d.one_in(2) ? "each" : "last";
  if (d.one_in(4)) p.options["lr"] = "1";
  if (d.one_in(4)) p.options["bucket"] = "100";
  if (d.one_in(6)) p.options["all"] = "1";
  if (p.schedule() == "DualPipeV" && d.one_in(2)) p.options["overlap"] = "1";
  if (p.get("cut") == "own" && !p.has("eval") && p.slices() == 1 && d.one_in(3)) p.options["odd"] = "1";
  if (d.one_in(4) && (!p.has("odd") || p.has("weigh"))) p.options["less"] = "1";
  if (d.one_in(4)) p.options["zg"] = p.has("pv") ? "none" : d.of(std::vector<std::string>{"none", "zeros", "detach"});
  if (d.one_in(6)) p.options["turn"] = "1";
  int const line = d.below(100);
  p.options["line"] = line < 40   ? "threads"
                      : line < 55 ? "rendezvous"
                      : line < 65 ? "delays"
                      : line < 83 ? "gloo"
                      : line < 88 ? "far"
                      : line < 98 ? "streams"
                                  : "fork";
  if (!tied_stages(p).empty() && d.one_in(2)) p.options["groups"] = d.one_in(4) ? "part" : "tied";
  if (p.get("line") != "fork" && d.one_in(20)) p.options["slip"] = p.ranks() * p.replicas() > 1 && d.one_in(2) ? "one" : "all";
  if (d.one_in(2)) p.options["ahead"] = "1";  // stages that recompute do it by R's
  if (d.one_in(8) && p.world() <= 4 && p.expert_replicas() == 1) p.options["shards"] = "2";
  if (p.get("line") != "fork" && p.steps() > 1 && d.one_in(6)) {
    p.options["resume"] = std::to_string(d.between(1, p.steps() - 1));
    if (d.one_in(2)) p.options["rate2"] = "1";
    if (p.has("tp") && d.one_in(2)) p.options["tp2"] = d.one_in(2) ? "1" : "4";
  }
  if (!p.has("tp") && tied_stages(p).empty() && d.one_in(8))
    p.options["act"] = d.one_in(4) ? "drop" : d.one_in(6) ? "again" : p.ends_late() && d.one_in(3) ? "rush" : "scale";
  if (p.schedule() != "DualPipeV" && d.one_in(8)) p.options["own"] = "1";
  if (p.by_sequences()) {
    for (char const* key : {"weigh", "cast", "masters", "cut", "vary"}) p.options.erase(key);
    p.options["dtype"] = "f64";
  } else if (p.slices() > 1 && !p.has("weigh") && d.one_in(20)) {
    p.options["label"] = "1";
  }
  if (p.has("tp")) {
    p.options.erase("shards");
    p.options.erase("cast");
    p.options.erase("masters");
    p.options["dtype"] = "f64";
    if (p.has("rep") && p.world() > 8) p.options["rep"] = "1";
  }
  if (p.expert_replicas() > 1) {
    for (char const* key : {"clip", "shard", "late"}) p.options.erase(key);
    if (!p.has("label") && !p.by_sequences() && d.one_in(2)) p.options["weigh"] = "1";
  }
}

}  // namespace

program generate(std::uint64_t seed) {
  dice d(seed * 0x51ed2701ULL + 17);
  for (;;) {
    program p;
    p.options["seed"] = std::to_string(seed);
    plan_facts facts;
    while (facts.stages == 0 || facts.stages > 8) {
      int const slices = d.one_in(6) ? d.between(2, 4) : 1;
      std::string const name = d.of(slices > 1 ? sliced_schedules() : schedules());
      int const ranks = d.between(1, 4), micro_batches = d.between(1, slices > 1 ? 4 : 8);
      facts = facts_of(name, ranks, micro_batches, slices);
      p.options.erase("slices");
      if (slices > 1) p.options["slices"] = std::to_string(slices);
      p.options["plan"] = name + "," + std::to_string(ranks) + "," + std::to_string(micro_batches);
    }
    if (d.one_in(6)) {
      int const group = d.between(2, 3), copies = group == 2 && p.ranks() <= 2 && d.one_in(2) ? 2 : 1;
      p.options["exp"] = std::to_string(group);
      p.options["rep"] = std::to_string(group * copies);
    }
    if (!p.has("exp") && d.one_in(6) && p.ranks() <= 3) {
      p.options["tp"] = "2";
      if (d.one_in(2)) p.options["faulty"] = "1";
    }
    if (p.slices() > 1 && d.one_in(3)) p.options["whole"] = "1";
    draw_model(d, p, facts.stages);
    draw_options(d, p);
    bool any = false;
    for (stage_text const& s : p.stages) {
      for (block const& b : s.blocks) any = any || (learns(b) && !b.has("frozen") && b.name != "aux");  // the loss needs one
    }
    if (any && not_promised(p).empty()) return p;
  }
}

}  // namespace differential

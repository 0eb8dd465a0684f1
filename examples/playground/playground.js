// The page: settings, the address, what is shown of the engine's answers.
(async () => {
  const began = performance.now();
  const by_id = (id) => document.getElementById(id);
  const defaults = {
    schedule: "ZBVZeroBubble",
    placement: "vee",
    p: 4,
    m: 8,
    v: 0,
    F: 1,
    I: 1,
    W: 1,
    over: "",
    lat: 0,
    size: 16,
    bw: 40,
    slow: -1,
    sf: 4,
    occ: 0,
    limit: 0,
    moves: "",
    csv: "",
    name: "",
    critical: 0,
    memory: 1,
    theme: "",
    palette: "usual"
  };
  const numeric = ["p", "m", "v", "F", "I", "W", "lat", "size", "bw", "slow", "sf", "occ", "limit", "critical", "memory"];
  const number = chevron.number, percent = (share) => (Math.abs(share) < 5e-4 ? 0 : share * 100).toFixed(1) + " %";

  // --- the engine
  const packed = Uint8Array.from(atob(by_id("wasm").textContent), (c) => c.charCodeAt(0));
  const unpacked = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
  const module = await WebAssembly.compile(unpacked);
  const engine = make_engine(module);
  const catalogue = JSON.parse(engine("names", ""));
  const worker_text = URL.createObjectURL(new Blob([by_id("worker").textContent], {type: "text/javascript"}));
  const new_worker = () => {
    const worker = new Worker(worker_text);
    worker.postMessage({module});
    return worker;
  };

  // --- settings and the address
  const state = {...defaults};
  const read_address = () => {
    Object.assign(state, defaults);
    for (const [key, value] of new URLSearchParams(location.hash.slice(1))) {
      if (!(key in defaults)) continue;
      if (!numeric.includes(key))
        state[key] = value;
      else if (Number.isFinite(Number(value)))
        state[key] = Number(value);
    }
    if (!catalogue.includes(state.schedule) && state.schedule !== "listed" && (state.schedule !== "csv" || !state.csv))
      state.schedule = defaults.schedule;
  };
  let written = "";
  const write_address = () => {
    const out = new URLSearchParams();
    for (const key of Object.keys(defaults))
      if (String(state[key]) !== String(defaults[key])) out.set(key, state[key]);
    // A long text is no address.
    if (state.csv.length > 20000) out.delete("csv");
    written = "#" + out.toString().replaceAll("%2C", ",").replaceAll("%3A", ":");
    if (location.hash !== written)
      history.replaceState(null, "", written === "#" ? location.pathname + location.search : written);
  };

  // --- requests
  const bandwidth = () => state.bw >= 40 ? Infinity : Math.round(10 ** (state.bw / 40 * 3) * 10) / 10;  // 1 to 1000 MB a unit
  const overrides = () => new Map(state.over.split(";").filter(Boolean).map((one) => {
    const [stage, ...costs] = one.split(/[:,]/).map(Number);
    return [stage, costs];
  }));
  const cost_lists = (stages) => {
    const own = overrides();
    return ["F", "I", "W"].map(
        (kind, k) => own.size === 0 || !stages ?
            [state[kind]] :
            Array.from({length: stages}, (_, s) => own.has(s) ? own.get(s)[k] : state[kind]));
  };
  /// \param other settings of this request alone; `csv` comes last, as its text has no end of its own
  const request = (other = {}) => {
    const stages = answer && answer.stages || 0;
    const [forward, input, weight] = cost_lists(stages);
    const all = {
      schedule: state.schedule,
      placement: state.placement,
      ranks: state.p,
      micro_batches: state.m,
      chunks: state.v,
      forward,
      backward_input: input,
      backward_weight: weight,
      cost_stages: forward.length > 1 ? stages : 0,
      latency: state.lat,
      message: Number.isFinite(bandwidth()) ? state.size / bandwidth() : 0,
      slow_link: state.slow,
      slow_factor: state.sf,
      occupies: state.occ,
      memory_limit: state.limit,
      moves: state.moves.replaceAll(";", ","),
      ...other
    };
    const lines = Object.entries(all).map(([key, value]) => key + "=" + value + "\n").join("");
    return lines + (all.schedule === "csv" ? "csv\n" + state.csv : "");
  };
  /// The answer if every stage cost the same: it says how many stages there are.
  const stages_of = () => {
    const over = state.over;
    state.over = "";
    const out = JSON.parse(engine("show", request()));
    state.over = over;
    return out;
  };

  // --- what is shown
  let answer = null, pictures = [];
  const timeline = new chevron.Timeline(by_id("timeline"), {
    moved: (rank, from, to) => {
      state.moves += (state.moves ? ";" : "") + [rank, from, to].join(",");
      update();
    }
  });
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const theme = () => state.theme || (dark.matches ? "dark" : "light");
  const figure = (words, value, title = "") => {
    const out = document.createElement("div");
    out.title = title;
    out.appendChild(document.createElement("b")).textContent = value;
    out.appendChild(document.createElement("span")).textContent = words;
    return out;
  };
  const show_figures = () => {
    const a = answer, to = by_id("figures");
    to.textContent = "";
    if (!a.playable) return;
    if (!a.complete) {
      to.append(
          figure("where every rank waits", number(a.makespan)),
          figure("actions that ran", pictures[0].count + " of " + a.actions));
      return;
    }
    const least = Math.min(...a.peak_in_flight), most = Math.max(...a.peak_in_flight);
    to.append(
        figure(
            "makespan", number(a.makespan),
            "first start to last end over all ranks: the time of a step whose optimizer waits for every rank"),
        figure("bubble", percent(a.bubble_makespan)), figure("span", number(a.span), "the longest single rank"),
        figure("bubble", percent(a.bubble_span)));
    if (a.bound > 0)
      to.append(figure(
          "lower bound", number(a.bound),
          "no schedule on this placement is shorter" + (state.limit > 0 ? " within the limit" : "")));
    if (a.bound > 0 && !a.law)
      to.append(
          figure("above the bound", a.makespan <= a.bound * (1 + 1e-9) ? "optimal" : "+" + percent(a.makespan / a.bound - 1)));
    to.append(figure("steady step", number(a.steady_step_time), "each of many steps without a barrier between them"));
    to.append(
        figure(
            a.chunks > 1 ? "peak in flight, chunks" : "peak in flight, microbatches",
            least === most ? String(most) : least + " to " + most),
        figure("messages", String(a.messages)));
  };
  const show_verdict = () => {
    const to = by_id("verdict"), a = answer;
    to.className = a.law || a.problem ? "broken" : "";
    to.textContent = "";
    const say = (strong, words) => {
      to.appendChild(document.createElement("b")).textContent = strong;
      to.appendChild(document.createTextNode(words));
    };
    if (a.problem)
      say("not usable", a.problem);
    else if (a.law)
      say("broken law: " + a.law.replaceAll("_", " "), a.sentence);
    else
      say("proved",
          "no rank waits in vain, every gradient is computed exactly once" +
              (state.limit > 0 ? ", memory stays within the limit" : "") + ".");
  };
  const options = (select, list, chosen) => {
    const wanted = JSON.stringify(list);
    if (select.dataset.list !== wanted) {
      select.dataset.list = wanted;
      select.textContent = "";
      for (const [value, words] of list) select.add(new Option(words, value));
    }
    select.value = String(chosen);
    if (select.selectedIndex < 0) select.selectedIndex = 0;
  };
  const chosen_stage = () => Number(by_id("stage").value || -1);
  const costs_shown = () => {
    const own = overrides().get(chosen_stage());
    return own || [state.F, state.I, state.W];
  };
  const show_controls = () => {
    const named = catalogue.map((name) => [name, name]);
    options(
        by_id("schedule"),
        [...named, ["listed", "list schedule: I, F, W"], ...(state.csv ? [["csv", state.name || "from CSV"]] : [])],
        state.schedule);
    by_id("placement").value = state.placement;
    by_id("p").value = state.p;
    by_id("m").value = state.m;
    options(by_id("v"), [[0, "its own"], ...[1, 2, 3, 4, 6, 8].map((n) => [n, String(n)])], state.v);
    for (const id of ["p", "m", "v"]) by_id(id).disabled = state.schedule === "csv";
    const ranks = answer && answer.ranks || state.p, stages = answer && answer.stages || 0;
    options(
        by_id("stage"),
        [
          [-1, "every stage"],
          ...Array.from(
              {length: stages}, (_, s) => [s, "stage " + s + ", rank " + answer.rank_of[s] + (overrides().has(s) ? " *" : "")])
        ],
        by_id("stage").value || -1);
    options(
        by_id("slow"),
        [[-1, "none"], ...Array.from({length: Math.max(0, ranks - 1)}, (_, r) => [r, "rank " + r + " \u2013 " + (r + 1)])],
        state.slow);
    by_id("occ").value = state.occ;
    const shown = {...state, F: costs_shown()[0], I: costs_shown()[1], W: costs_shown()[2]};
    for (const id of ["F", "I", "W", "lat", "size", "bw", "sf", "limit"]) by_id(id).value = shown[id];
    by_id("limit").max = Math.max(16, Math.min(128, 2 * ranks));
    const say = (id, words) => {
      document.querySelector(`output[for=${id}]`).textContent = words;
    };
    for (const id of ["F", "I", "W", "lat"]) say(id, number(shown[id]));
    say("size", state.size);
    say("bw", Number.isFinite(bandwidth()) ? number(bandwidth(), 3) : "\u221e");
    say("sf", state.slow < 0 ? "" : "\u00d7" + state.sf);
    by_id("sf").disabled = state.slow < 0;
    say("limit", state.limit > 0 ? state.limit : "none");
    by_id("undo").disabled = !state.moves;
    const press = (id, on) => by_id(id).setAttribute("aria-pressed", String(!!on));
    press("critical", state.critical);
    press("memory", state.memory);
    press("edit", timeline.options.edit);
    press("palette", state.palette === "safe");
    press("theme", theme() === "dark");
    document.documentElement.dataset.theme = theme();
    by_id("timeline").classList.toggle("edits", timeline.options.edit);
    by_id("hint").textContent = timeline.options.edit ?
        "Drag an action along its rank: the laws say at once what that breaks. u takes the last move back." :
        "Point at an action, an idle stretch or the strip of chunks in flight. Drag to pan; Ctrl and wheel zoom.";
    for (const id of ["csv", "cpp"]) by_id(id).disabled = !answer || !answer.playable;
  };
  const show_look = () => {
    timeline.set({theme: theme(), palette: state.palette, critical: !!state.critical, memory: !!state.memory});
    chevron.legend(by_id("legend"), pictures, timeline.options);
    draw_compared();
  };

  /// Which placement a plan has, if it is one of those with a name.
  const placement_of = (a) => {
    const {ranks, stages, rank_of} = a;
    const known = {
      linear: stages === ranks ? (s) => s : () => -1,
      vee: stages === 2 * ranks ? (s) => s < ranks ? s : 2 * ranks - 1 - s : () => -1,
      loop: (s) => s % ranks,
      wave: (s) => Math.floor(s / ranks) % 2 === 0 ? s % ranks : ranks - 1 - s % ranks
    };
    return Object.keys(known).find((name) => rank_of.every((rank, s) => rank === known[name](s)));
  };

  let shown_shape = "";
  const update_now = () => {
    // Costs of single stages are sent as a list, as long as the schedule that is shown has stages.
    if (state.over) answer = stages_of();
    answer = JSON.parse(engine("show", request()));
    pictures = answer.model ? chevron.decode(answer.model) : [];
    for (const p of pictures) p.stopped = !answer.complete;
    // The search looks on the placement that is shown.
    if (state.schedule !== "listed" && answer.rank_of) state.placement = placement_of(answer) || state.placement;
    const shape = [state.schedule, answer.ranks, answer.micro_batches].join();
    timeline.set({mark: answer.law && answer.at ? answer.at : null});
    timeline.show(pictures, shape === shown_shape);
    shown_shape = shape;
    show_figures();
    show_verdict();
    show_controls();
    show_look();
    write_address();
    compare_soon();
  };
  let waiting = 0;
  const update = () => {
    if (waiting) return;
    waiting = requestAnimationFrame(() => {
      waiting = 0;
      update_now();
    });
  };

  // --- all schedules on one axis
  let comparing = null, queue = [], asked_for = "", compare_timer = 0;
  const compared = new Map();
  const compare_soon = () => {
    clearTimeout(compare_timer);
    compare_timer = setTimeout(() => {
      compare_timer = 0;
      compare();
    }, 200);
  };
  const compare = () => {
    if (!answer.playable) return;
    const stages = answer.stages;
    const [forward, input, weight] = cost_lists(stages);
    const base = {
      forward,
      backward_input: input,
      backward_weight: weight,
      cost_stages: stages,
      chunks: 0,
      moves: "",
      ranks: answer.ranks,
      micro_batches: answer.micro_batches
    };
    const request_of = (name) => request({...base, schedule: name});
    const wanted = request_of("");
    if (wanted === asked_for) return;
    asked_for = wanted;
    queue = catalogue.map((name) => ({what: "show", name, request: request_of(name), of: wanted}));
    if (!comparing) {
      comparing = new_worker();
      comparing.onmessage = ({data}) => {
        comparing.busy = false;
        if (data.of === asked_for) {
          compared.set(data.name, {...data.answer, pictures: data.answer.model ? chevron.decode(data.answer.model) : []});
          draw_compared();
        }
        ask_next();
      };
    }
    ask_next();
  };
  const ask_next = () => {
    if (comparing.busy || queue.length === 0) return;
    comparing.busy = true;
    comparing.postMessage(queue.shift());
  };
  let drawing = 0;
  const draw_compared = () => {
    if (!drawing)
      drawing = requestAnimationFrame(() => {
        drawing = 0;
        draw_compared_now();
      });
  };
  const draw_compared_now = () => {
    const to = by_id("compare");
    const all = [...compared.entries()].map(([name, a]) => ({name, ...a}));
    const good = (a) => a.playable && a.complete && !a.law;
    const longest = Math.max(0, ...all.filter((a) => a.playable && a.complete).map((a) => a.makespan));
    if (queue.length === 0)
      all.sort((a, b) => good(b) - good(a) || a.makespan - b.makespan || catalogue.indexOf(a.name) - catalogue.indexOf(b.name));
    by_id("compare-note").textContent =
        "Each cuts the same model: costs are of a rank's whole share. Dashed: the lower bound of its placement, within " +
        (state.limit > 0 ? "the memory limit" : "the memory that it declares (V-Half, V-Min)") +
        (queue.length > 0 ? ". " + queue.length + " to come." : ".");
    to.style.opacity = queue.length > 0 ? "0.6" : "";
    const ground = chevron.themes[theme()], fills = chevron.palettes[state.palette], ratio = window.devicePixelRatio || 1;
    while (to.children.length > all.length) to.lastChild.remove();
    all.forEach((a, k) => {
      let row = to.children[k];
      if (!row) {
        row = to.appendChild(document.createElement("div"));
        row.className = "row";
        row.append(document.createElement("button"), document.createElement("canvas"), document.createElement("small"));
        row.firstChild.addEventListener("click", () => choose(row.dataset.name));
      }
      const [button, canvas, words] = row.children;
      row.dataset.name = a.name;
      button.textContent = a.name;
      button.setAttribute("aria-pressed", String(a.name === state.schedule));
      words.className = good(a) ? "" : "broken";
      words.textContent = "";
      if (good(a)) {
        words.appendChild(document.createElement("b")).textContent = number(a.makespan);
        const most = Math.max(...a.peak_in_flight);
        words.append(
            ", bubble " + percent(a.bubble_makespan), document.createElement("br"),
            (a.makespan <= a.bound * (1 + 1e-9) ? "optimal" : "+" + percent(a.makespan / a.bound - 1)) + ", peak " +
                number(most / a.chunks, 3));
      } else {
        const over = a.law === "in_flight";  // the commonest, said shortly
        words.textContent = over ?
            number(a.makespan) + ", but peak " + number(Math.max(...a.peak_in_flight) / a.chunks, 3) + " is above the limit" :
            a.sentence || a.problem;
      }
      const width = Math.max(100, canvas.clientWidth), height = Math.max(26, Math.min(72, 6 * (a.ranks || 4)));
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
      canvas.style.height = height + "px";
      canvas.style.opacity = good(a) ? "" : "0.35";
      if (!a.playable || !a.complete) return;
      const c = canvas.getContext("2d");
      c.setTransform(ratio, 0, 0, ratio, 0, 0);
      c.imageSmoothingEnabled = false;
      c.drawImage(
          chevron.pixel_rows(a.pictures[0], 0, longest, Math.round(width * ratio), fills, ground.idle), 0, 0, width, height);
      if (!good(a)) return;
      const x = Math.min(width - 1, a.bound / longest * width);
      for (const [colour, wide, dash] of [[ground.sheet, 4, []], [ground.accent, 1.5, [4, 3]]]) {
        c.strokeStyle = colour;
        c.lineWidth = wide;
        c.setLineDash(dash);
        c.beginPath();
        c.moveTo(x, 0);
        c.lineTo(x, height);
        c.stroke();
      }
    });
  };

  // --- the search
  let searching = null, search_began = 0, search_timer = 0;
  const stop_search = () => {
    if (searching) searching.terminate();
    searching = null;
    clearInterval(search_timer);
    by_id("stop").hidden = true;
    by_id("search").disabled = false;
  };
  const search = () => {
    stop_search();
    const stages = answer.stages || state.p;
    const chunks = answer.rank_of && placement_of(answer) === state.placement ? answer.chunks :
        state.placement === "linear"                                          ? 1 :
                                                                                state.v || 2;
    const [forward, input, weight] = cost_lists(stages);
    const own =
        answer.playable && answer.stages ? {forward, backward_input: input, backward_weight: weight, cost_stages: stages} : {};
    by_id("progress").hidden = false;
    by_id("stop").hidden = false;
    by_id("search").disabled = true;
    by_id("found").textContent = "starting";
    const bar = document.querySelector("progress");
    bar.value = 0;
    const ranks = state.schedule === "csv" && answer.ranks || state.p,
          micro_batches = state.schedule === "csv" && answer.micro_batches || state.m;
    let round = null, spent = 0, trials_done = 0, round_began = 0;
    search_began = performance.now();
    searching = new_worker();
    searching.onmessage = ({data}) => {
      if (data.what === "round") {
        if (round) {
          spent = performance.now() - search_began;
          trials_done += round.trials;
        }
        round = data;
        round_began = performance.now();
        return;
      }
      stop_search();
      bar.value = 1;
      const a = data.answer;
      if (a.problem) {
        by_id("found").textContent = a.problem;
        return;
      }
      const better = a.published ? "; the catalogue's best here, " + a.published + ", takes " + number(a.published_length) : "";
      by_id("found").textContent = number(a.length) +
          (a.optimal ? ", optimal" : ", +" + percent(a.length / a.bound - 1) + " above the bound") + better + ". " +
          ((performance.now() - search_began) / 1000).toFixed(1) + " s";
      Object.assign(state, {schedule: "csv", csv: a.csv, name: "searched, " + state.placement, moves: ""});
      update();
    };
    search_timer = setInterval(() => {
      if (!round) return;
      const all = [1 / 40, 1 / 6, 1].map((share) => share / (1 + 1 / 6 + 1 / 40));
      let share = all.slice(0, round.round).reduce((sum, one) => sum + one, 0);
      const pace = trials_done > 0 ? spent / trials_done : 0;
      const inside = pace > 0 ? Math.min(0.98, (performance.now() - round_began) / (pace * round.trials)) : 0;
      bar.value = share + inside * all[round.round];
      by_id("found").textContent = "round " + (round.round + 1) + " of " + round.rounds + ", " + round.trials + " trials" +
          (round.best ? "; best so far " + number(round.best.length) + ", bound " + number(round.best.bound) : "");
    }, 100);
    // The schedule is looked for among those that a catalogue's name, moves and CSV know nothing of.
    searching.postMessage({
      what: "search",
      actions: 3 * ranks * chunks * micro_batches,
      request: request({schedule: "", moves: "", ranks, micro_batches, chunks, ...own})
    });
  };

  // --- what people do
  const set = (change) => {
    Object.assign(state, change);
    update();
  };
  const choose = (name) => {
    set({schedule: name, moves: ""});
  };
  by_id("schedule").addEventListener("change", (e) => choose(e.target.value));
  // A schedule of the catalogue lives where it lives: on another placement it is a list schedule.
  by_id("placement").addEventListener("change", (e) => set({placement: e.target.value, moves: "", schedule: "listed", v: 0}));
  for (const id of ["p", "m"])
    by_id(id).addEventListener("input", (e) => {
      const value = Math.floor(Number(e.target.value));
      if (value >= 1 && value <= Number(e.target.max)) set({[id]: value, moves: ""});
    });
  by_id("v").addEventListener("change", (e) => set({v: Number(e.target.value), moves: ""}));
  for (const id of ["slow", "occ"]) by_id(id).addEventListener("change", (e) => set({[id]: Number(e.target.value)}));
  for (const id of ["lat", "size", "bw", "sf", "limit"])
    by_id(id).addEventListener("input", (e) => set({[id]: Number(e.target.value)}));
  by_id("stage").addEventListener("change", show_controls);
  ["F", "I", "W"].forEach((kind, k) => by_id(kind).addEventListener("input", (e) => {
    const stage = chosen_stage(), value = Number(e.target.value);
    if (stage < 0) return set({[kind]: value});
    const own = overrides();
    const costs = [...(own.get(stage) || [state.F, state.I, state.W])];
    costs[k] = value;
    own.set(stage, costs);
    set({over: [...own].map(([s, list]) => s + ":" + list.join(",")).join(";")});
  }));
  const save = (name, text, type) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], {type}));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  };
  const file_name = () =>
      (state.schedule === "csv" ? "schedule" : state.schedule) + "-" + answer.ranks + "x" + answer.micro_batches;
  const undo = () => set({moves: state.moves.split(";").slice(0, -1).join(";")});
  const does = {
    fit: () => timeline.fit(),
    closer: () => timeline.zoom(1.5),
    farther: () => timeline.zoom(1 / 1.5),
    critical: () => set({critical: 1 - state.critical}),
    memory: () => set({memory: 1 - state.memory}),
    edit: () => {
      timeline.set({edit: !timeline.options.edit});
      show_controls();
    },
    undo,
    palette: () => set({palette: state.palette === "safe" ? "usual" : "safe"}),
    theme: () => set({theme: theme() === "dark" ? "light" : "dark"}),
    csv: () => save(file_name() + ".csv", engine("csv", request()), "text/csv"),
    cpp: () => save(file_name() + ".cpp", engine("program", request()), "text/plain"),
    search,
    stop: stop_search,
    check: () => set({schedule: "csv", csv: by_id("text").value, name: "pasted", moves: ""}),
    take: () => {
      by_id("text").value = engine("csv", request());
    },
    link: () => {
      const say = (words) => {
        by_id("link").textContent = words;
        setTimeout(() => {
          by_id("link").textContent = "copy link";
        }, 1500);
      };
      navigator.clipboard.writeText(location.href).then(() => say("copied"), () => say("it is the address"));
    },
  };
  for (const [id, act] of Object.entries(does)) by_id(id).addEventListener("click", act);
  const step_schedule = (by) =>
      choose(catalogue[(catalogue.indexOf(state.schedule) + by + catalogue.length) % catalogue.length]);
  const keys = {
    n: ["next schedule", () => step_schedule(1)],
    b: ["schedule before", () => step_schedule(-1)],
    "+": ["zoom in", does.closer],
    "-": ["zoom out", does.farther],
    "0": ["the whole step", does.fit],
    ArrowLeft: ["pan", () => timeline.pan(-0.2)],
    ArrowRight: ["pan", () => timeline.pan(0.2)],
    c: ["critical path", does.critical],
    m: ["chunks in flight", does.memory],
    e: ["edit: drag actions", does.edit],
    u: [
      "take the last move back",
      () => {
        if (state.moves) undo();
      }
    ],
    s: [
      "search",
      () => {
        if (!searching) search();
      }
    ],
    Escape: ["stop the search", stop_search],
    p: ["palette for the colour-blind", does.palette],
    t: ["light or dark", does.theme],
    "?": [
      "this list",
      () => {
        by_id("keys").open = !by_id("keys").open;
        by_id("keys").scrollIntoView({block: "nearest"});
      }
    ],
  };
  for (const [key, [words]] of Object.entries(keys)) {
    const row = document.querySelector("#keys tbody").insertRow();
    row.insertCell().appendChild(document.createElement("kbd")).textContent = key;
    row.insertCell().textContent = words;
  }
  document.addEventListener("keydown", (e) => {
    if (e.ctrlKey || e.metaKey || e.altKey || e.target.closest("textarea, select, input")) return;
    const entry = keys[e.key === "=" ? "+" : e.key];
    if (!entry) return;
    e.preventDefault();
    entry[1]();
  });
  dark.addEventListener("change", update);
  window.addEventListener("hashchange", () => {
    if (location.hash === written) return;
    read_address();
    update();
  });
  window.addEventListener("resize", draw_compared);

  read_address();
  update_now();
  window.playground = {
    state,
    engine,
    request,
    timeline,
    compared,
    update_now,
    started: performance.now() - began,
    get answer() { return answer; },
    get pictures() { return pictures; },
    get idle() {
      return !waiting && !compare_timer && !drawing && queue.length === 0 && !(comparing && comparing.busy) && !searching;
    }
  };
})();

// Beside the page: one schedule of the comparison at a time, or a search in rounds of growing effort. The last round is what
// `chevron-plan search` does; those before say early what there is.
let engine = null;
onmessage = ({data}) => {
  if (data.module) {
    engine = make_engine(data.module);
    return;
  }
  try {
    if (data.what !== "search") {
      postMessage({...data, answer: JSON.parse(engine(data.what, data.request))});
      return;
    }
    const whole = Math.max(200, Math.min(60000, Math.floor(60e6 / data.actions)));
    const rounds = [Math.ceil(whole / 40), Math.ceil(whole / 6), whole];
    let best = null;
    for (let k = 0; k < rounds.length; ++k) {
      postMessage({what: "round", round: k, rounds: rounds.length, trials: rounds[k], best});
      const answer = JSON.parse(engine("search", data.request + "trials=" + (k + 1 < rounds.length ? rounds[k] : 0) + "\n"));
      if (answer.problem) {
        postMessage({what: "found", answer});
        return;
      }
      if (!best || answer.length <= best.length) best = answer;
      if (answer.optimal) break;
    }
    postMessage({what: "found", answer: best});
  } catch (error) { postMessage({...data, answer: {problem: "the engine stopped: " + error.message}}); }
};

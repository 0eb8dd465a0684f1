// The engine: page.cpp as WebAssembly. It asks its surroundings for nothing; what WASI would give is answered with "not there".
"use strict";
function make_engine(module) {
  const surroundings = {};
  for (const {module: name, name: call} of WebAssembly.Module.imports(module))
    (surroundings[name] = surroundings[name] || {})[call] = () => 8;
  const exported = new WebAssembly.Instance(module, surroundings).exports;
  exported._initialize();
  const write = new TextEncoder(), read = new TextDecoder();
  /// \param what `names` `show` `json` `csv` `program` `search`; request: lines of `key=value`
  return (what, request) => {
    const bytes = write.encode(request);
    const to = exported.input(bytes.length);
    new Uint8Array(exported.memory.buffer).set(bytes, to);
    const from = exported[what]();
    const memory = new Uint8Array(exported.memory.buffer);
    return read.decode(memory.subarray(from, memory.indexOf(0, from)));
  };
}

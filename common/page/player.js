// The memory player: runs a stage's loops (LOOPS, translated from the modules by common/trace.py), notes each access,
// and plays the accesses through a small cache, or a warp's through sectors and banks.

const LINE = 64; // bytes of a cache line
const SECTOR = 32; // bytes of a GPU's sector
const BANKS = 32; // of shared memory, each one word of 4 bytes wide
const WARP = 32; // threads

const player = (() => {
  // What a loop touches, in order.

  class Memory {
    constructor(pitch) {
      Object.assign(this, { arrays: [], steps: [], multiplied: 0, end: 0, pitch });
    }
    array(name, shape, cell = 4) {
      const array = new Matrix(this, name, shape, cell, this.end);
      this.end = Math.ceil((this.end + array.bytes) / LINE) * LINE; // each begins a line
      this.arrays.push(array);
      return array;
    }
    shared(name, shape) {
      const known = this.arrays.find((array) => array.name === name);
      if (known) return known;
      const array = this.array(name, [shape[0], shape[1] + this.pitch]);
      array.shared = true;
      return array;
    }
    multiplyAdd(count) {
      this.multiplied += count;
      return 0;
    }
    unpack(line, raw, at, block) {
      raw.read(line, BLOCK.size, at);
      block.write(line, BLOCK.length, 0);
    }
  }

  class Matrix {
    constructor(memory, name, shape, cell, base) {
      Object.assign(this, { memory, name, shape, cell, base, number: memory.arrays.length });
      this.columns = shape[shape.length - 1];
      this.rows = shape.length === 2 ? shape[0] : 1;
      this.bytes = this.rows * this.columns * cell;
    }
    lineOf(at) { return Math.floor((this.base + at * this.cell) / LINE); }
    note(kind, line, count, index) {
      const at = Array.isArray(index) ? index[0] * this.columns + index[1] : index;
      const [first, last] = [this.lineOf(at), this.lineOf(at + count - 1)]; // of the cache
      this.memory.steps.push({ array: this, kind, line, count, at, first, last, multiplied: this.memory.multiplied });
      return 0;
    }
    read(line, count, index) { return this.note("read", line, count, index); }
    write(line, count, index) { return this.note("write", line, count, index); }
    prefetch(line, index) { return this.note("prefetch", line, 1, index); }
    fill(line) { return this.note("write", line, this.rows * this.columns, 0); }
  }

  const isKernel = (stage) => stage.startsWith("gemm/");

  /** Every access of a stage's matmul, for T x K times K x N. */
  function trace(stage, set) {
    if (isKernel(stage)) return warpTrace(stage, set);
    const memory = new Memory(0);
    const x = memory.array("x", [set.T, set.K]);
    let w;
    if (stage === "quantized") {
      const raw = memory.array("w", [set.N, (set.K / BLOCK.length) * BLOCK.size], 1);
      w = [set.N, set.K, 0, BLOCK.length, BLOCK.size, raw];
    } else {
      w = memory.array("w", [set.K, set.N]);
    }
    LOOPS[stage].run(memory, x, w, { ...set, LANES });
    return memory;
  }

  /** Every request of one warp of one block; a step's `lanes` are 32 indices, null where a lane takes no part. */
  function warpTrace(stage, set) {
    const lanes = Array.from({ length: WARP }, (_, lane) => {
      const thread = set.warp * WARP + lane;
      const memory = new Memory(set.pitch);
      const [x, w, out] = [["x", [set.T, set.K]], ["w", [set.K, set.N]], ["out", [set.T, set.N]]].map(
        ([name, shape]) => memory.array(name, shape));
      if (thread < set.TILE * set.TILE) {
        const [along, across] = [thread % set.TILE, Math.floor(thread / set.TILE)];
        const threadIdx = set.swap ? { x: across, y: along } : { x: along, y: across };
        LOOPS[stage].run(memory, threadIdx, { x: set.block }, x, w, out, set.T, set.N, set.K, set);
      }
      return memory;
    });
    const longest = lanes.reduce((a, b) => (b.steps.length > a.steps.length ? b : a));
    longest.steps = longest.steps.map((step, i) => ({
      ...step,
      lanes: lanes.map((lane) => lane.steps[i]?.at ?? null),
      multiplied: lanes.reduce((sum, lane) => sum + (lane.steps[i]?.multiplied ?? lane.multiplied), 0),
    }));
    longest.steps = longest.steps.filter((step) => step.lanes.some((at) => at !== null));
    longest.multiplied = lanes.reduce((sum, lane) => sum + lane.multiplied, 0);
    return longest;
  }

  // Where the accesses are served.

  /** Lines in sets of `ways`; within a set, the one unused for longest makes room. */
  class Cache {
    constructor(memory, lines, ways) {
      this.ways = Math.min(ways, lines);
      this.sets = lines / this.ways;
      this.holds = new Int32Array(lines).fill(-1); // slot -> line; the slots of a set lie side by side
      this.where = new Int32Array(memory.end / LINE).fill(-1); // line -> slot
      this.used = new Float64Array(lines); // slot -> when, 0 for never
      this.dirty = new Uint8Array(lines);
      this.now = 0;
    }
    /** Whether the line was there. If not, `evicted` is the line that made room, or -1; `back` whether it was changed. */
    touch(line, write) {
      let slot = this.where[line];
      const hit = slot >= 0;
      if (!hit) {
        const first = (line % this.sets) * this.ways;
        slot = first;
        for (let i = first; i < first + this.ways; i++) if (this.used[i] < this.used[slot]) slot = i;
        this.evicted = this.holds[slot];
        this.back = Boolean(this.dirty[slot]);
        if (this.evicted >= 0) this.where[this.evicted] = -1;
        this.holds[slot] = line;
        this.where[line] = slot;
        this.dirty[slot] = 0;
      }
      this.used[slot] = ++this.now;
      if (write) this.dirty[slot] = 1;
      return hit;
    }
  }

  function note(recent, array, cost) {
    recent.push({ array, cost });
    if (recent.length > 64) recent.shift();
  }

  /** The state after some steps; advance(to) goes on from there. A touch of each line of an access counts as one. */
  class Run {
    constructor(memory, set) {
      Object.assign(this, { memory, at: 0, moved: 0, last: null, recent: [] });
      this.cache = new Cache(memory, set.lines, set.ways);
      this.fetched = new Set();
      this.counts = memory.arrays.map(() => ({ accesses: 0, hits: 0, misses: 0, asked: 0 }));
    }
    get multiplied() {
      return this.memory.steps[this.at]?.multiplied ?? this.memory.multiplied;
    }
    advance(to) {
      for (; this.at < to; this.at++) {
        const step = this.memory.steps[this.at];
        this.step(step);
        note(this.recent, step.array, this.last.missed ? 10 : 2);
      }
      return this;
    }
    step(step) {
      const count = this.counts[step.array.number];
      this.last = { step, missed: 0, evicted: [] };
      if (step.at + step.count > step.array.rows * step.array.columns) return; // a prefetch beyond the end
      for (let line = step.first; line <= step.last; line++) {
        const hit = this.cache.touch(line, step.kind === "write");
        if (!hit) {
          this.fetched.add(line);
          this.last.missed += 1;
          if (this.cache.evicted >= 0) this.last.evicted.push(this.cache.evicted);
          this.moved += this.cache.back ? 2 * LINE : LINE; // what was changed is written back
        }
        if (step.kind === "prefetch") {
          count.asked += hit ? 0 : 1;
        } else {
          count.accesses += 1;
          count[hit ? "hits" : "misses"] += 1;
        }
      }
    }
  }

  /** A request's pieces: sectors of global memory, or for each bank of shared memory its words. */
  function pieces({ array, lanes }) {
    const used = [...new Set(lanes.filter((at) => at !== null))];
    const group = (key) => {
      const groups = new Map();
      for (const at of used) groups.set(key(at), [...(groups.get(key(at)) ?? []), at]);
      return groups;
    };
    if (!array.shared) return { used, sectors: group((at) => Math.floor((array.base + 4 * at) / SECTOR)) };
    const banks = group((at) => at % BANKS);
    return { used, banks, waves: Math.max(...[...banks.values()].map((words) => words.length)) };
  }

  /** As Run, for a warp: sectors moved, bytes used of them, and passes over shared memory. */
  class WarpRun {
    constructor(memory) {
      Object.assign(this, { memory, at: 0, moved: 0, last: null, recent: [] });
      this.touched = memory.arrays.map(() => new Set());
      this.counts = memory.arrays.map(() => ({ requests: 0, pieces: 0, used: 0, most: 0 }));
    }
    get multiplied() {
      return this.memory.steps[this.at]?.multiplied ?? this.memory.multiplied;
    }
    advance(to) {
      for (; this.at < to; this.at++) {
        const step = this.memory.steps[this.at];
        const count = this.counts[step.array.number];
        const found = pieces(step);
        const parts = found.waves ?? found.sectors.size;
        this.last = { step, ...found };
        count.requests += 1;
        count.pieces += parts;
        count.most = Math.max(count.most, parts);
        count.used += 4 * found.used.length;
        found.used.forEach((at) => this.touched[step.array.number].add(at));
        note(this.recent, step.array, 1 + (9 * parts) / WARP);
        if (!found.waves) this.moved += SECTOR * parts;
      }
      return this;
    }
  }

  const begin = (memory, set) => (memory.steps[0]?.lanes ? new WarpRun(memory) : new Run(memory, set));
  const whole = (stage, set) => {
    const memory = trace(stage, set);
    return begin(memory, set).advance(memory.steps.length);
  };

  return { trace, begin, whole, isKernel };
})();

// The page: what is drawn, and the controls.

(() => {
  const root = document.getElementById("player");
  if (!root) return;
  const part = (name) => root.querySelector(`[data-part="${name}"]`);
  const number = (value, digits = 0) =>
    value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  const plural = (value, what) => `${times(value)} ${what}${value === 1 ? "" : "s"}`;
  const times = (value) => number(value, value < 10 && !Number.isInteger(value) ? 1 : 0);
  const sum = (values) => values.reduce((a, b) => a + b, 0);
  const range = (from, to, step = 1) =>
    Array.from({ length: Math.floor((to - from) / step) + 1 }, (_, i) => from + i * step);
  const powers = (from, to) => range(from, to).map((i) => 2 ** i);
  const still = matchMedia("(prefers-reduced-motion: reduce)");

  function make(tag, attributes = {}, ...children) {
    const svg = ["svg", "path", "rect", "g"].includes(tag) && "http://www.w3.org/2000/svg";
    const node = svg ? document.createElementNS(svg, tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.append(...children);
    return node;
  }

  // What can be set, and what it is at first. T is the rows of x, whatever they stand for.
  const SETTINGS = {
    T: ["rows of x", range(1, 8)],
    K: ["K", [32, 64]],
    N: ["N, columns of the result", range(16, 80)],
    TILE: ["TILE", powers(0, 6)],
    AHEAD: ["AHEAD", range(0, 512, 16)],
    lines: ["cache, lines of 64 bytes", powers(3, 7)],
    ways: ["lines in a set"],
    block: ["thread block"],
    warp: ["warp of the block"],
    pitch: ["words added to a row of a tile", range(0, 8)],
    swap: ["threadIdx.x and .y swapped", [0, 1]],
  };
  const ON_GPU = { T: range(33, 72), K: range(16, 72), N: range(33, 72), TILE: powers(3, 5) };
  const choices = (name) => {
    const { T, N, TILE, lines } = set();
    if (name === "ways") return powers(0, Math.log2(lines));
    if (name === "warp") return range(0, TILE ** 2 / WARP - 1);
    if (name === "block") return range(0, Math.ceil(T / TILE) * Math.ceil(N / TILE) - 1);
    return (player.isKernel(stage) && ON_GPU[name]) || SETTINGS[name][1];
  };
  const cpu = { T: 4, K: 64, N: 48, lines: 64, ways: 64 };
  const gpu = { T: 64, K: 64, N: 64, block: 0, warp: 0 };
  const shared = { swap: 0, pitch: 0 };
  const own = {
    naive: {}, tiling: { TILE: 16 }, simd: { TILE: 8, AHEAD: 16 }, quantized: {},
    "gemm/naive": { TILE: 32 }, "gemm/coalesced": { TILE: 32 }, "gemm/tiled": { TILE: 32, ...shared },
  };
  const SWEPT = { naive: "lines", quantized: "lines", "gemm/tiled": "pitch" };

  let stage = "tiling";
  let run, full, views, timer, sweeping;
  const common = () => (player.isKernel(stage) ? gpu : cpu);
  const set = () => ({ ...shared, ...common(), ...own[stage] });

  // One sentence on each stage, from the whole run's numbers.
  const NOTICE = {
    naive(run) {
      const column = new Set(range(0, set().K - 1).map((k) => named(run, "w").lineOf(k * set().N))).size;
      return `One output walks down a column of w, over ${plural(column, "line")}; the cache holds ${cpu.lines}. ${fetched(run)}`;
    },
    tiling(run) {
      const [before, now] = [player.whole("naive", set()), run].map((r) => fetches(count(r, "w")));
      return `A tile of ${set().TILE} × ${set().TILE} floats of w is used for ${plural(cpu.T, "row")} of x before the next. ` +
        `${fetched(run)} naive, with the same cache, fetches ${number(before)}: ${better(before, now)}.`;
    },
    simd(run) {
      const [now, before] = [run, player.whole("naive", set())].map((r) => count(r, "w"));
      return `One access takes ${LANES} floats of w where so many are left: it is touched ${number(now.accesses)} times, by ` +
        `naive ${number(before.accesses)}. ${fetched(run)} Of these, ${number(now.asked)} were asked for ahead, ` +
        `and ${number(now.misses)} had to be waited for.`;
    },
    quantized(run) {
      const block = count(run, "block");
      const floats = Math.ceil((set().N * set().K * 4) / LINE);
      return `In ${BLOCK.name} blocks w lies on ${plural(count(run, "w").lines, "line")}, as float32 it would on ${floats}. ` +
        `${fetched(run)} Each block is unpacked once, for ${plural(cpu.T, "row")} of x; the scratch that it is unpacked ` +
        `into misses ${number(block.misses)} of ${number(block.accesses)} times.`;
    },
    kernel(run) {
      const [x, w] = ["x", "w"].map((name) => count(run, name));
      if (!x.requests) return "No thread of this warp has an output: all return at once.";
      const load = ({ pieces, requests, used }) =>
        `${plural(pieces / requests, "sector")}, ${number((SECTOR * pieces) / requests)} bytes, and uses ${times(used / requests)} of them`;
      return `On average a load of x by this warp moves ${load(x)}; one of w moves ${load(w)}.`;
    },
    tiled(run) {
      const before = player.whole("gemm/coalesced", set());
      const loads = (r) => count(r, "x").requests + count(r, "w").requests;
      const tiles = ["x_tile", "w_tile"].map((name) => count(run, name));
      const [requests, passes] = ["requests", "pieces"].map((what) => sum(tiles.map((tile) => tile[what])));
      const most = Math.max(...tiles.map((tile) => tile.most));
      return `This warp loads from global memory ${plural(loads(run), "time")}, the same warp of coalesced ${number(loads(before))}. ` +
        `Shared memory answers ${number(requests)} requests in ${number(passes)} passes: ` +
        (most > 1 ? `up to ${most} of the words asked for at once lie in one bank.` : "no two words asked for at once lie in one bank.");
    },
  };
  const fetches = ({ misses, asked }) => misses + asked;
  const fetched = (run) => {
    const w = count(run, "w");
    const each = fetches(w) / w.lines;
    return each === 1 ? `Each of w’s ${plural(w.lines, "line")} is fetched once.`
      : `w’s ${plural(w.lines, "line")} are fetched ${number(fetches(w))} times, ${plural(each, "time")} each on average.`;
  };
  const better = (before, after) =>
    before > after ? `${times(before / after)} times as many` : before < after ? "fewer" : "as many";
  const named = (run, name) => run.memory.arrays.find((array) => array.name === name);
  const count = (run, name) => {
    const array = named(run, name);
    return array && { ...run.counts[array.number], lines: Math.ceil(array.bytes / LINE) };
  };

  // Drawing. A float is 1 x 1, a byte a quarter as wide.

  function cells(array, at, length) {
    const wide = array.cell / 4;
    let d = "";
    for (const end = at + length; at < end;) {
      const [row, column] = [Math.floor(at / array.columns), at % array.columns];
      const here = Math.min(array.columns - column, end - at);
      d += `M${column * wide} ${row}h${here * wide}v1h${-here * wide}z`;
      at += here;
    }
    return d;
  }

  function view(array) {
    const [width, height] = [(array.columns * array.cell) / 4, array.rows];
    const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, style: `--columns: ${width}; --unit: ${player.isKernel(stage) ? 5 : 6}px`, "aria-hidden": "true" });
    svg.append(make("rect", { width, height, class: "bare" }));
    const lines = new Map();
    const total = array.rows * array.columns;
    for (let at = 0; !run.memory.steps[0]?.lanes && at < total; at += LINE / array.cell) {
      const path = make("path", { d: cells(array, at, Math.min(LINE / array.cell, total - at)), class: "line" });
      lines.set(array.lineOf(at), path);
    }
    const [trail, moved, now] = [player.isKernel(stage) ? "touched" : "trail", "moved", "now"].map((name) => make("path", { class: name }));
    svg.append(...lines.values(), trail, moved, now);
    const shape = array.rows > 1 ? `${array.rows} × ${array.columns}` : array.columns;
    const unit = array.cell === 1 ? "bytes" : "floats";
    const title = make("figcaption", {}, make("b", {}, array.name), ` ${shape} ${unit}${array.shared ? ", shared" : ""}`);
    const figure = make("figure", { "data-array": array.name, class: `array-${array.number}` }, title, svg);
    return { array, figure, lines, moved, trail, now };
  }

  function center(array, at) {
    return `${((at % array.columns) + 0.5) * (array.cell / 4)} ${Math.floor(at / array.columns) + 0.5}`;
  }

  const KIND = { read: "reads", write: "writes", prefetch: "asks for" };

  function place(array, at, length) {
    const [row, column] = [Math.floor(at / array.columns), at % array.columns];
    const last = length > 1 ? `…${Math.min(column + length, array.columns) - 1}` : "";
    return `${array.name}[${array.rows > 1 ? `${row}, ` : ""}${column}${last}]`;
  }

  function draw() {
    const { last } = run;
    for (const { array, lines, moved, trail, now } of views) {
      const here = last?.step.array.number === array.number;
      for (const [line, path] of lines) {
        path.setAttribute("class", `line ${run.cache.where[line] >= 0 ? "held" : run.fetched.has(line) ? "left" : ""}`);
      }
      if (player.isKernel(stage)) {
        const sectors = here && last.sectors ? [...last.sectors.keys()] : [];
        const first = array.base / SECTOR;
        const total = array.rows * array.columns;
        moved.setAttribute("d", sectors.map((s) => cells(array, 8 * (s - first), Math.min(8, total - 8 * (s - first)))).join(""));
        trail.setAttribute("d", [...run.touched[array.number]].map((at) => cells(array, at, 1)).join(""));
        now.setAttribute("d", here ? last.used.map((at) => cells(array, at, 1)).join("") : "");
      } else {
        const walk = run.memory.steps.slice(Math.max(0, run.at - 40), run.at).filter((s) => s.array === array);
        trail.setAttribute("d", walk.length ? `M${walk.map((s) => center(array, s.at)).join("L")}` : "");
        now.setAttribute("d", here ? cells(array, last.step.at, last.step.count) : "");
        now.setAttribute("class", here && last.missed ? "now missed" : "now");
      }
    }
    part("code").childNodes.forEach((node, i) => node.classList.toggle("at", i + 1 === last?.step.line));
    root.querySelector('[data-do="play"]').textContent = timer ? "Pause" : "Play";
    part("position").value = run.at;
    part("position").setAttribute("aria-valuetext", `${run.at} of ${run.memory.steps.length}`);
    part("status").setAttribute("aria-live", timer ? "off" : "polite");
    part("status").textContent = told();
    drawStrip();
    drawRecent();
    drawTable();
  }

  function told() {
    const { last, memory } = run;
    const steps = memory.steps.length;
    if (!last) return `Before the first of ${number(steps)} ${player.isKernel(stage) ? "requests" : "accesses"}.`;
    const { step } = last;
    const here = `${number(run.at)} of ${number(steps)}: `;
    if (step.lanes) {
      const lanes = step.lanes.filter((at) => at !== null).length;
      const what = `${here}${plural(lanes, "lane")} ${step.kind === "read" ? "read" : "write"} ${step.array.name}, `;
      if (last.waves) return `${what}${plural(last.used.length, "different word")}, in ${last.waves} ${last.waves === 1 ? "pass" : "passes"}.`;
      return `${what}${plural(last.sectors.size, "sector")}: ${number(SECTOR * last.sectors.size)} bytes moved, ${4 * last.used.length} used.`;
    }
    const gone = last.evicted.map((line) => whose(line)).join(", ");
    const found = last.missed ? `miss, ${last.missed * LINE} bytes fetched${gone && `; a line of ${gone} makes room`}` : "hit";
    return `${here}${KIND[step.kind]} ${place(step.array, step.at, step.count)}: ${step.kind === "prefetch" && !last.missed ? "nothing to fetch" : found}.`;
  }

  const owner = (line) => run.memory.arrays.findLast((array) => array.base <= line * LINE);
  const whose = (line) => owner(line).name;

  function drawStrip() {
    const strip = part("strip");
    const { last } = run;
    if (!player.isKernel(stage)) {
      const { holds, ways } = run.cache;
      strip.style.setProperty("--ways", ways);
      strip.className = "player-strip cache";
      strip.replaceChildren(...Array.from(holds, (line) => {
        if (line < 0) return make("span", { class: "slot" });
        const now = last && last.step.first <= line && line <= last.step.last;
        return make("span", { class: `slot array-${owner(line).number} full ${now ? (last.missed ? "missed" : "hit") : ""}` },
          whose(line)[0]);
      }));
    } else if (last?.sectors) {
      strip.className = `player-strip sectors array-${last.step.array.number}`;
      strip.replaceChildren(...[...last.sectors].sort(([a], [b]) => a - b).map(([sector, used]) => {
        const first = (sector * SECTOR - last.step.array.base) / 4;
        return make("span", { class: "sector" }, ...range(first, first + 7).map((at) =>
          make("i", used.includes(at) ? { class: "used" } : {})));
      }));
    } else {
      strip.className = `player-strip banks array-${last?.step.array.number}`;
      strip.replaceChildren(...range(0, BANKS - 1).map((bank) => {
        const words = last?.banks?.get(bank) ?? [];
        return make("span", { class: words.length > 1 ? "bank conflict" : "bank" }, ...words.map(() => make("i")));
      }));
    }
    part("strip-title").textContent = !player.isKernel(stage)
      ? `The cache: ${plural(run.cache.sets, "set")} of ${plural(run.cache.ways, "line")}`
      : last?.waves ? "The 32 banks of shared memory, and the words asked of each" : "The request’s sectors, eight floats each; dark: used";
  }

  function drawRecent() {
    part("recent").replaceChildren(...run.recent.slice(-64).map(({ array, cost }, i) =>
      make("rect", { x: i + 0.1, width: 0.8, y: 10 - cost, height: cost, class: `array-${array.number}` })));
    part("recent-title").textContent = player.isKernel(stage)
      ? "The latest requests: the taller, the more sectors or passes" : "The latest accesses: tall ones missed";
  }

  const all = (counts) =>
    Object.fromEntries(Object.keys(counts[0]).map((key) => [key, sum(counts.map((c) => c[key]))]));

  function drawTable() {
    const ahead = full.counts.some((c) => c.asked);
    const columns = player.isKernel(stage)
      ? [["requests", (c) => c.requests], ["sectors or passes", (c) => c.pieces],
        ["for each", (c) => (c.requests ? times(c.pieces / c.requests) : "–")], ["bytes used", (c) => c.used],
        ["at the end", (c, end) => end.pieces]]
      : [["accesses", (c) => c.accesses], ["hits", (c) => c.hits], ["misses", (c) => c.misses],
        ...(ahead ? [["asked ahead", (c) => c.asked]] : []), ["fetched at the end", (c, end) => fetches(end)]];
    const row = (name, c, end, type) => make("tr", { class: type }, make("th", { scope: "row" }, name),
      ...columns.map(([, value]) => value(c, end)).map((v) => make("td", {}, typeof v === "number" ? number(v) : v)));
    const body = run.memory.arrays.map((array, i) => row(array.name, run.counts[i], full.counts[i], `array-${i}`));
    if (!player.isKernel(stage)) body.push(row("all", all(run.counts), all(full.counts), "all"));
    part("table").replaceChildren(
      make("thead", {}, make("tr", {}, make("td"), ...columns.map(([name]) => make("th", { scope: "col" }, name)))),
      make("tbody", {}, ...body));
    const intensity = (r) => (r.moved ? number((2 * r.multiplied) / r.moved, 2) : "–");
    part("totals").textContent =
      `So far ${number(2 * run.multiplied)} FLOP and ${number(run.moved)} bytes moved: arithmetic intensity ${intensity(run)} FLOP/byte. ` +
      `At the end ${number(2 * full.multiplied)} FLOP and ${number(full.moved)} bytes: ${intensity(full)}.`;
  }

  /** What the whole run costs with other values of one setting. */
  function drawSweep() {
    const name = SWEPT[stage] ?? "TILE";
    const [what, cost] = !player.isKernel(stage) ? ["Lines fetched", (r) => fetches(all(r.counts))]
      : name === "pitch" ? ["Passes over shared memory", (r) => all(r.counts.filter((_, i) => r.memory.arrays[i].shared)).pieces]
        : ["Sectors moved", (r) => all(r.counts).pieces];
    const at = (value) => {
      const other = { ...set(), ...changed(name, value) };
      const memory = name === "lines" ? run.memory : player.trace(stage, other);
      return cost(player.begin(memory, other).advance(memory.steps.length));
    };
    const bars = choices(name).map((value) => [value, at(value)]);
    const most = Math.max(...bars.map(([, c]) => c), 1);
    part("sweep").replaceChildren(...bars.map(([value, c]) =>
      make("div", { class: value === set()[name] ? "player-bar here" : "player-bar" }, make("span", {}, String(value)),
        make("i", { style: `--share: ${c / most}` }), make("span", {}, number(c)))));
    part("sweep-title").textContent = `${what} in the whole run, by ${SETTINGS[name][0]}`;
  }

  // Controls.

  function rebuild(position) {
    clearInterval(timer);
    timer = null;
    const memory = player.trace(stage, set());
    full = player.begin(memory, set()).advance(memory.steps.length);
    run = player.begin(memory, set()).advance(Math.min(position ?? (player.isKernel(stage) ? 1 : Math.floor(memory.steps.length / 5)), memory.steps.length));
    part("position").max = memory.steps.length;
    views = memory.arrays.map(view);
    const [matrices, scratch] = [true, false].map((operand) =>
      views.filter((v) => ["x", "w", "out"].includes(v.array.name) === operand).map((v) => v.figure));
    part("matrices").replaceChildren(...matrices);
    part("scratch").replaceChildren(...scratch);
    part("legend").textContent = player.isKernel(stage)
      ? "Filled: what the lanes of the warp touch now. Around it: the sectors that have to be moved for it. Pale: what the warp touched before."
      : "Strong: lines in the cache. Pale: lines fetched and gone again. Filled: the access now, red where it missed; the thin path: where the loop came from.";
    part("code").replaceChildren(...LOOPS[stage].text.split("\n").map((line) => make("span", {}, `${line}\n`)));
    part("notice").textContent = (NOTICE[stage] ?? (stage === "gemm/tiled" ? NOTICE.tiled : NOTICE.kernel))(full);
    draw();
    clearTimeout(sweeping);
    sweeping = setTimeout(drawSweep, 150); // ms: not at each step of a slider that is being moved
  }

  function go(to) {
    to = Math.max(0, Math.min(to, run.memory.steps.length));
    if (to < run.at) run = player.begin(run.memory, set());
    run.advance(to);
    draw();
  }

  function stop() {
    clearInterval(timer);
    timer = null;
  }

  function play() {
    const end = run.memory.steps.length;
    if (still.matches) return go(end); // whoever wants no motion gets the result
    if (run.at === end) go(0);
    let due = run.at;
    timer = setInterval(() => {
      due = Math.min(due + 2 ** part("speed").value / 20, end);
      if (due >= end) stop();
      go(Math.floor(due));
    }, 50);
    draw();
  }

  const DO = {
    reset: () => go(0),
    back: () => go(run.at - 1),
    step: () => go(run.at + 1),
    end: () => go(run.memory.steps.length),
    play,
  };
  root.querySelector(".player-buttons").addEventListener("click", ({ target }) => {
    const action = target.dataset.do;
    if (!action) return;
    const playing = Boolean(timer);
    stop();
    if (action === "play" && playing) draw();
    else DO[action]();
  });
  part("position").addEventListener("input", ({ target }) => {
    stop();
    go(Number(target.value));
  });

  /** A cache that is one set stays one. */
  const changed = (name, value) => ({ [name]: value, ...(name === "lines" && cpu.ways === cpu.lines && { ways: value }) });
  const home = (name) => (name in own[stage] ? own[stage] : common());

  function controls() {
    const names = Object.keys({ ...common(), ...own[stage] });
    part("settings").replaceChildren(...names.map((name) => {
      const input = make("input", { type: "range", name, min: 0, "aria-label": SETTINGS[name][0] });
      input.addEventListener("input", () => {
        const change = changed(name, choices(name)[input.value]);
        Object.entries(change).forEach(([key, value]) => { home(key)[key] = value; });
        limits();
        rebuild();
      });
      const real = LOOPS[stage].constants[name]; // too large for matrices of this size
      const title = SETTINGS[name][0] + (real === undefined ? "" : `, in the stage ${number(real)}`);
      return make("label", {}, make("span", {}, `${title} `, make("b")), input);
    }));
    limits();
  }

  /** What can be chosen may depend on what is: the blocks on the shape, the warps on the tile. */
  function limits() {
    for (const input of root.querySelectorAll(".player-settings input")) {
      const values = choices(input.name);
      const at = home(input.name);
      if (!values.includes(at[input.name])) at[input.name] = values[values.length - 1];
      input.max = values.length - 1;
      input.value = values.indexOf(at[input.name]);
      input.setAttribute("aria-valuetext", at[input.name]);
      input.parentNode.querySelector("b").textContent = at[input.name];
    }
  }

  root.querySelector(".player-stages").append(...Object.keys(LOOPS).map((name) => {
    const input = make("input", { type: "radio", name: "player-stage", value: name });
    input.checked = name === stage;
    input.addEventListener("change", () => {
      stage = name;
      controls();
      rebuild();
    });
    return make("label", {}, input, name);
  }));
  controls();
  rebuild();
})();

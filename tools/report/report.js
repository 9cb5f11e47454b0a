// Draws the page of `mantissa report` from the metrics that it holds as JSON (tools/report/report_page.h has its form): a summary, charts
// (report_charts.js), maps of errors (report_maps.js), analyses of saved models (report_analyses.js), tables. The page holds these files as
// one module, this one last. Every text of a
// run becomes a text node or the value of an attribute, never markup; nothing is loaded. The view is in the fragment of the address, so
// that a link or a reload shows the same: #hide=1,2&smooth=0.9&log=loss&steps=100..200.

// ---- elements and numbers

// Control characters are shown as U+FFFD.
const readable = text => String(text).replace(/[\0-\x08\x0b-\x1f\x7f]/g, '\ufffd');

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, readable(value));
  for (const child of children.flat()) element.append(child instanceof Node ? child : readable(child));
  return element;
}
const make = (name, attributes = {}, ...children) => fill(document.createElement(name), attributes, children);
const shape = (name, attributes = {}, ...children) =>
    fill(document.createElementNS('http://www.w3.org/2000/svg', name), attributes, children);
const by = id => document.getElementById(id);

const color = run => `run${run % 8}`;
const swatch = run => make('span', {class: `swatch ${color(run)}`});

// Writes so many significant digits.
function number(value, digits = 5) {
  if (!Number.isFinite(value)) return 'NaN';
  const rounded = Number(value.toPrecision(digits)), size = Math.abs(rounded);
  return size >= 1e7 || (size < 1e-4 && size > 0) ? rounded.toExponential() : String(rounded);
}
const optional = (value, digits) => value === null ? '-' : number(value, digits);
const percent = share => `${number(100 * share, 3)}%`;
const counted = (count, noun) => `${count} ${noun}${count === 1 ? '' : 's'}`;

function table(heads, rows) {
  const cell = (name, content) => content instanceof Node ? content : make(name, {}, content);
  const row = (name, contents) => make('tr', {}, contents.map(content => cell(name, content)));
  return make('div', {class: 'scroll'}, make('table', {}, row('th', heads), rows.map(contents => row('td', contents))));
}
const textCell = (...content) => make('td', {class: 'text'}, ...content);

// ---- runs

// A value that is not finite, or so large that a range of it has no size, is NaN: a gap.
function readSeries({steps, values, points}) {
  const places = new Float64Array(values.length);
  let i = 0;
  for (const [first, stride, count] of steps) {
    for (let k = 0; k < count; ++k) places[i++] = first + k * stride;
  }
  return {steps: places, values: Float64Array.from(values, value => value === null || Math.abs(value) > 1e300 ? NaN : value), points};
}

let runs = [], analyses = [], comparison = null;

function readRuns() {
  ({runs, analyses, comparison} = JSON.parse(by('metrics').textContent));
  for (const run of runs) {
    for (const [name, series] of Object.entries(run.series)) run.series[name] = readSeries(series);
  }
}

// ---- the view

const WEIGHTS = [0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999];  // of smoothing
// hidden: indexes of runs; smooth: a weight; log: names of charts; steps: [first, last], or null for all.
const view = {
  hidden: new Set(),
  smooth: 0,
  log: new Set(),
  steps: null
};

function readFragment() {
  const words = new URLSearchParams(location.hash.slice(1));
  const list = name => (words.get(name) || '').split(',').filter(Boolean);
  view.hidden = new Set(list('hide').map(Number));
  view.log = new Set(list('log'));
  const weight = Number(words.get('smooth'));
  view.smooth = weight > 0 && weight < 1 ? weight : 0;
  const steps = (words.get('steps') || '').split('..').map(Number);
  view.steps = steps.length === 2 && steps[0] < steps[1] ? steps : null;
}

function writeFragment() {
  const words = [];
  if (view.hidden.size) words.push(`hide=${[...view.hidden].join(',')}`);
  if (view.smooth) words.push(`smooth=${view.smooth}`);
  if (view.log.size) words.push(`log=${[...view.log].join(',')}`);
  if (view.steps) words.push(`steps=${view.steps.join('..')}`);
  history.replaceState(null, '', `#${words.join('&')}`);
}

function changeView(changes) {
  Object.assign(view, changes);
  writeFragment();
  drawAll();
}

// Returns the set without what it has, or with what it has not.
const toggled = (set, value) => new Set(set.has(value) ? [...set].filter(other => other !== value) : [...set, value]);

const isShown = run => !view.hidden.has(run);

// The steps of all charts and maps, so that what is above each other happened at once.
function shownSteps() {
  if (view.steps) return view.steps;
  let first = Infinity, last = -Infinity;
  runs.forEach((run, index) => {
    if (!isShown(index)) return;
    for (const {steps} of Object.values(run.series)) {
      if (!steps.length) continue;
      first = Math.min(first, steps[0]);
      last = Math.max(last, steps[steps.length - 1]);
    }
  });
  if (first > last) return [0, 1];
  const margin = first < last ? 0 : Math.max(1, 1e-9 * Math.abs(first));
  return [first - margin, last + margin];
}

function zoom(first, last) {
  const steps = [Math.floor(first), Math.ceil(last)];
  if (steps[0] < steps[1]) changeView({steps});
}

// ---- the tip beside the pointer

function showTip(x, y, ...children) {
  const tip = by('tip');
  tip.replaceChildren(...children.flat());
  tip.hidden = false;
  const {width, height} = tip.getBoundingClientRect();
  const left = x + 16 + width > innerWidth - 8 ? x - 16 - width : x + 16;
  tip.style.left = `${Math.max(8, Math.min(left, innerWidth - 8 - width))}px`;
  tip.style.top = `${Math.max(8, Math.min(y + 16, innerHeight - 8 - height))}px`;
}

function pointAway() {
  by('tip').hidden = true;
  for (const chart of charts) chart.mark(null);
}

// ---- tables and texts

const lastValue = ({values}) => values.length ? number(values[values.length - 1]) : '-';

const bestValue = best => best ? `${number(best.value)}${best.objective === 'loss' ? '' : ` ${best.objective}`}` : '-';

// "2, at steps 100, 350"; of many the newest.
function restartsText({restarts}) {
  if (!restarts.length) return '0';
  return `${restarts.length}, at ${restarts.length === 1 ? 'step' : 'steps'} ${restarts.length > 4 ? '... ' : ''}${
      restarts.slice(-4).join(', ')}`;
}

// The table of `mantissa compare`.
function makeComparison() {
  if (!comparison) return;
  const {title, head, rows, notes} = comparison;
  by('comparison').append(
      make('h2', {}, 'Comparison'), make('p', {}, title), table(head, rows.map(([name, ...cells]) => [textCell(name), ...cells])),
      ...notes.map(note => make('p', {class: 'soft'}, note)));
}

function makeSummary() {
  const heads = [
    'run', 'precision', 'steps', 'restarts', 'tokens', 'parameters', 'last training loss', 'last validation loss', 'best', 'tok/s', 'ranks',
    'device'
  ];
  by('summary').append(table(
      heads,
      runs.map(
          (run, index) =>
              [textCell(swatch(index), run.name), textCell(run.precision), `${run.step} of ${run.steps}`, textCell(restartsText(run)),
               run.tokens, run.parameters, lastValue(run.series.loss), lastValue(run.series.valid_loss), bestValue(run.best),
               lastValue(run.series.tok_s), run.ranks ?? '-', textCell(run.device)])));
}

function expertsRow({layer, imbalance, dropped, balance_loss, z_loss, load}) {
  const all = load.reduce((a, b) => a + b, 0), most = load.reduce((a, b) => Math.max(a, b), 0);
  return [
    layer, number(imbalance, 4), all ? number(most * load.length / all, 4) : '-', all ? load.indexOf(most) : '-', percent(dropped),
    optional(balance_loss, 4), optional(z_loss, 4)
  ];
}

function makeExperts() {
  const having = runs.filter(run => run.experts);
  if (!having.length) return;
  by('experts').append(make('h2', {}, 'Experts'));
  for (const {name, experts} of having) {
    const heads = [
      'layer', `load, largest over mean, step ${experts.step}`, `from step ${experts.first} on`, 'busiest expert in these steps',
      'dropped', 'balance loss', 'z-loss'
    ];
    by('experts').append(make('h3', {}, name), table(heads, experts.layers.map(expertsRow)));
  }
}

function makeSamples() {
  const having = runs.filter(run => run.samples.newest.length);
  if (having.length) by('samples').append(make('h2', {}, 'Samples'));
  for (const {name, samples: {count, newest}} of having) {
    by('samples').append(
        make('h3', {}, name), count > newest.length ? make('p', {class: 'soft'}, `the newest ${newest.length} of ${count}`) : '',
        ...newest.map(
            ({step, prompt, text}, i) =>
                make('details', i ? {} : {open: ''}, make('summary', {}, `step ${step}`), make('pre', {}, make('b', {}, prompt), text))));
  }
}

function makeConfiguration() {
  const part = by('configuration'), keys = [...new Set(runs.flatMap(run => Object.keys(run.settings)))].sort();
  const differing = keys.filter(key => runs.some(run => run.settings[key] !== runs[0].settings[key]));
  part.append(make('h2', {}, 'Configuration'));
  if (differing.length) {
    part.append(
        make('h3', {}, 'What differs'),
        table(
            ['setting', ...runs.map(run => run.name)],
            differing.map(key => [key, ...runs.map(run => run.settings[key] ?? '-')].map(text => textCell(text)))));
  }
  for (const {name, config} of runs)
    part.append(make('details', {}, make('summary', {}, name), make('pre', {}, config || 'the run folder has no config.json')));
}

// ---- the page

let charts = [], maps = [], boxes = [];

function makeView() {
  boxes = runs.map((run, index) => {
    const box = make('input', {type: 'checkbox', autocomplete: 'off'});
    box.addEventListener('change', () => changeView({hidden: toggled(view.hidden, index)}));
    by('runs').append(
        make('label', {}, box, swatch(index), run.name, run.ranks > 1 ? make('span', {class: 'soft'}, ` ${run.ranks} ranks`) : ''));
    return box;
  });
  by('smooth').max = WEIGHTS.length - 1;
  by('smooth').addEventListener('input', () => changeView({smooth: WEIGHTS[by('smooth').value]}));
  by('all').addEventListener('click', () => changeView({steps: null}));
  addEventListener('hashchange', () => {
    readFragment();
    drawAll();
  });
  addEventListener('keydown', event => {
    if (event.key === 'Escape') pointAway();
  });
}

function drawAll() {
  pointAway();
  boxes.forEach((box, index) => {
    box.checked = isShown(index);
  });
  by('smooth').value = WEIGHTS.findLastIndex(weight => weight <= view.smooth);
  by('smooth').setAttribute('aria-valuetext', view.smooth || 'off');
  by('weight').textContent = view.smooth || 'off';
  by('all').disabled = view.steps === null;
  for (const each of [...charts, ...maps]) each.draw();
}

function makePage() {
  document.title = by('title').textContent = readable(`mantissa report: ${[...runs.map(({name}) => name), ...analyses.map(({model}) => model)].join(' ')}`);
  analyses.forEach(makeAnalysis);
  by('view').hidden = !runs.length;
  if (!runs.length) return;
  makeComparison();
  makeSummary();
  charts =
      CHARTS.filter(({rare, name}) => !rare || runs.some(run => run.series[name].steps.length)).map(definition => new Chart(definition));
  by('charts').append(...charts.map(chart => chart.figure));
  const cut = runs.flatMap(run => Object.values(run.series)).filter(({points, steps}) => points > steps.length);
  if (cut.length) {
    by('thinned').hidden = false;
    by('thinned').textContent = `This page would be too large with every point: it has the least and the greatest value of each part of ${
        cut.length} series (${cut[0].steps.length} of ${cut[0].points} points). metrics.jsonl has all of them.`;
  }
  makeExperts();
  maps = makeMaps();
  makeSamples();
  makeConfiguration();
  makeView();
  readFragment();
  drawAll();
  let width = by('charts').clientWidth;
  new ResizeObserver(() => {
    if (by('charts').clientWidth === width) return;
    width = by('charts').clientWidth;
    drawAll();
  }).observe(by('charts'));
}

try {
  readRuns();
  makePage();
} catch (error) {
  by('problem').hidden = false;
  by('problem').textContent = `This page cannot be drawn: ${error.message}`;
  throw error;
}

// The line charts of a report page, as SVG: all of them show the same steps, with a common cursor.

// ---- scales

// Returns the least of 1, 2 or 5 times a power of ten that is not below the value.
function roundStep(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5].map(factor => factor * power).find(step => step >= value * (1 - 1e-9)) || 10 * power;
}

function multiples(step, low, high) {
  const first = Math.ceil(low / step - 1e-9), count = Math.min(100, Math.floor(high / step + 1e-9) - first + 1);
  return Array.from({length: Math.max(0, count)}, (_, i) => Number(((first + i) * step).toPrecision(12)));
}

// Holds all of [low, high], with about `count` ticks; a range too narrow for them is widened.
function linearScale(low, high, count) {
  const size = Math.max(Math.abs(low), Math.abs(high));
  if (!(high - low > Math.max(1e-9 * size, 1e-300))) {
    const margin = size < 1e-290 ? 1 : 0.1 * size;
    [low, high] = [low - margin, high + margin];
  }
  const step = roundStep((high - low) / count);
  low = Math.floor(low / step + 1e-9) * step;
  high = Math.ceil(high / step - 1e-9) * step;
  return {low, high, ticks: multiples(step, low, high), share: value => (value - low) / (high - low)};
}

// Powers of ten are its ticks, or those of a linear scale if it spans less than two.
function logScale(low, high, count) {
  let scale = linearScale(low, high, count);
  if (high / low >= 100) {
    const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
    scale = {
      low: 10 ** first,
      high: 10 ** last,
      ticks: multiples(Math.ceil((last - first) / count), first, last).map(power => 10 ** power)
    };
  }
  const from = Math.log(scale.low > 0 ? scale.low : low), to = Math.log(scale.high);
  return {...scale, ticks: scale.ticks.filter(tick => tick > 0), share: value => (Math.log(value) - from) / (to - from)};
}

// ---- series

// Returns how many of the ascending steps are below `step`.
function countBelow(steps, step) {
  let low = 0, high = steps.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

function nearest(steps, step) {
  const after = countBelow(steps, step);
  if (after === 0) return 0;
  return after === steps.length || step - steps[after - 1] <= steps[after] - step ? after - 1 : after;
}

// Averages each value with those before it, whose weights fall exponentially, corrected for the start. Gaps stay.
function smoothed(values, weight) {
  let sum = 0, weights = 0;
  return values.map(value => {
    if (Number.isNaN(value)) return value;
    sum = weight * sum + (1 - weight) * value;
    weights = weight * weights + (1 - weight);
    return sum / weights;
  });
}

// Returns the indexes in [begin, end) to draw: all, or the least and the greatest of each part, so that outliers stay, and a gap of it.
function thinned(values, begin, end, parts) {
  const kept = [];
  if (end - begin <= 3 * parts) {
    for (let i = begin; i < end; ++i) kept.push(i);
    return kept;
  }
  for (let part = 0; part < parts; ++part) {
    const from = begin + Math.floor(part * (end - begin) / parts), to = begin + Math.floor((part + 1) * (end - begin) / parts);
    let least = from, greatest = from, gap = from;
    for (let i = from; i < to; ++i) {
      if (Number.isNaN(values[i])) {
        gap = i;
        continue;
      }
      if (!(values[i] >= values[least])) least = i;
      if (!(values[i] <= values[greatest])) greatest = i;
    }
    kept.push(...new Set([least, greatest, gap].sort((a, b) => a - b)));
  }
  return kept;
}

// ---- charts

const LEFT = 64, TOP = 10, HEIGHT = 260, BOTTOM = HEIGHT - 34;

const CHARTS = [
  {
    name: 'loss',
    title: 'loss (dashed: validation)',
    lines: [{series: 'loss', label: ' training'}, {series: 'valid_loss', label: ' validation', dots: true}]
  },
  {name: 'lr', title: 'learning rate', lines: [{series: 'lr', label: '', exact: true}]},
  {name: 'grad_norm', title: 'gradient norm', lines: [{series: 'grad_norm', label: ''}]},
  {name: 'tok_s', title: 'throughput, tokens per second', lines: [{series: 'tok_s', label: ''}]},
  {name: 'imbalance', title: 'load of experts, largest over mean, worst layer', lines: [{series: 'imbalance', label: ''}], rare: true},
];

class Chart {
  constructor({name, title, lines}) {
    this.name = name;
    this.title = title;
    this.lines = runs.flatMap(
        (run, index) =>
            lines.map(line => ({...line, ...run.series[line.series], run: index, label: run.name + line.label, average: {weight: 0}})));
    this.log = make('button', {type: 'button', 'aria-label': `logarithmic scale: ${title}`}, 'log');
    this.log.addEventListener('click', () => changeView({log: toggled(view.log, name)}));
    this.plot = make('div', {class: 'plot'});
    this.figure = make('figure', {'data-chart': name}, make('figcaption', {}, title, this.log), this.plot);
    this.cursor = null;  // the step that keys moved to
  }

  shownLines() { return this.lines.filter(line => isShown(line.run) && line.steps.length); }
  isLog() { return view.log.has(this.name); }
  isDrawable(value) { return !Number.isNaN(value) && (!this.isLog() || value > 1e-300); }

  // The values of a line, smoothed if the view says so.
  values(line) {
    if (!view.smooth || line.dots || line.exact) return line.values;
    if (line.average.weight !== view.smooth) line.average = {weight: view.smooth, values: smoothed(line.values, view.smooth)};
    return line.average.values;
  }

  // The indexes of a line from the last point before the shown steps to the first behind them.
  range(line) {
    return [Math.max(0, countBelow(line.steps, this.first) - 1), Math.min(line.steps.length, countBelow(line.steps, this.last) + 1)];
  }

  draw() {
    this.log.setAttribute('aria-pressed', this.isLog());
    [this.first, this.last] = shownSteps();
    const lines = this.shownLines();
    let low = Infinity, high = -Infinity;
    for (const line of lines) {
      for (let i = countBelow(line.steps, this.first); i < line.steps.length && line.steps[i] <= this.last; ++i) {
        if (!this.isDrawable(line.values[i])) continue;
        low = Math.min(low, line.values[i]);
        high = Math.max(high, line.values[i]);
      }
    }
    this.svg = null;
    if (low > high)
      return void this.plot.replaceChildren(make('p', {class: 'soft'}, view.steps ? 'no values in these steps' : 'no values'));
    this.y = (this.isLog() ? logScale : linearScale)(low, high, 5);
    this.right = Math.max(200, this.plot.clientWidth) - 12;
    this.svg = shape('svg', {
      viewBox: `0 0 ${this.right + 12} ${HEIGHT}`,
      height: HEIGHT,
      role: 'img',
      tabindex: 0,
      'aria-label': `${this.title}: ${lines.map(line => line.label).join(', ')}; steps ${number(this.first, 9)} to ${number(this.last, 9)}`
    });
    this.svg.append(shape(
        'clipPath', {id: `clip-${this.name}`}, shape('rect', {x: LEFT, y: TOP - 2, width: this.right - LEFT, height: BOTTOM - TOP + 4})));
    this.drawAxes();
    this.drawRestarts();
    const clipped = shape('g', {'clip-path': `url(#clip-${this.name})`});
    for (const line of [...lines.filter(line => !line.dots), ...lines.filter(line => line.dots)]) this.drawLine(clipped, line);
    this.cross = shape('g');
    this.svg.append(clipped, this.cross);
    this.listen();
    this.plot.replaceChildren(this.svg);
  }

  px(step) { return LEFT + (step - this.first) / (this.last - this.first) * (this.right - LEFT); }
  py(value) { return BOTTOM - this.y.share(value) * (BOTTOM - TOP); }
  stepOf(x) { return this.first + Math.min(1, Math.max(0, (x - LEFT) / (this.right - LEFT))) * (this.last - this.first); }

  drawAxes() {
    const short = this.y.ticks.map(tick => number(tick)), distinct = new Set(short).size === short.length;
    for (const [i, tick] of this.y.ticks.entries()) {
      const y = this.py(tick).toFixed(1), text = distinct ? short[i] : String(Number(tick.toPrecision(12)));
      this.svg.append(
          shape('line', {class: 'grid', x1: LEFT, x2: this.right, y1: y, y2: y}),
          shape('text', {x: LEFT - 6, y: Number(y) + 4, 'text-anchor': 'end'}, text));
    }
    const room = 9 * String(Math.round(this.last)).length + 20, count = Math.max(1, Math.min(8, (this.right - LEFT) / room));
    for (const tick of multiples(Math.max(1, roundStep((this.last - this.first) / count)), this.first, this.last)) {
      const x = this.px(tick).toFixed(1), text = Math.abs(tick) < 1e12 ? String(tick) : number(tick);
      const anchor = Number(x) + 4 * text.length > this.right + 12 ? 'end' : 'middle';
      this.svg.append(
          shape('line', {class: 'grid', x1: x, x2: x, y1: TOP, y2: BOTTOM}),
          shape('text', {x: anchor === 'end' ? this.right + 12 : x, y: BOTTOM + 16, 'text-anchor': anchor}, text));
    }
    this.svg.append(shape('text', {x: (LEFT + this.right) / 2, y: HEIGHT - 3, 'text-anchor': 'middle'}, 'step'));
  }

  drawRestarts() {
    for (const {run, step} of shownRestarts(this.first, this.last)) {
      const x = this.px(step);
      this.svg.append(
          shape('path', {class: `restart ${color(run)}`, 'data-restart': step, d: `M${x.toFixed(1)} ${TOP}V${BOTTOM}`}),
          shape('path', {class: `restart flag ${color(run)}`, d: `M${(x - 4).toFixed(1)} ${BOTTOM + 5}h8l-4 -6z`}));
    }
  }

  drawLine(parent, line) {
    const [begin, end] = this.range(line), parts = Math.ceil(this.right - LEFT), values = this.values(line);
    const path = (name, ofValues) => parent.append(
        shape('path', {class: name, 'data-line': line.label, d: this.pathOf(line.steps, ofValues, thinned(ofValues, begin, end, parts))}));
    if (values !== line.values) path(`line raw ${color(line.run)}`, line.values);
    path(`line ${line.dots ? 'dashed ' : ''}${color(line.run)}`, values);
    if (!line.dots) return;
    for (const i of thinned(values, begin, end, parts)) {
      if (this.isDrawable(values[i])) parent.append(this.pointAt(line.steps[i], values[i], {class: `dot ${color(line.run)}`, r: 3.5}));
    }
  }

  // A point between two gaps shows as a dot.
  pathOf(steps, values, indexes) {
    let path = '', gap = true;
    for (const i of indexes) {
      const drawable = this.isDrawable(values[i]);
      if (drawable) path += `${gap ? 'M' : 'L'}${this.px(steps[i]).toFixed(1)} ${this.py(values[i]).toFixed(1)}${gap ? 'h0' : ''}`;
      gap = !drawable;
    }
    return path;
  }

  pointAt(step, value, attributes) { return shape('circle', {cx: this.px(step).toFixed(1), cy: this.py(value).toFixed(1), ...attributes}); }

  // ---- pointer and keys

  listen() {
    const svg = this.svg, xOf = event => event.clientX - svg.getBoundingClientRect().left;
    let from = null, chosen = null;
    svg.addEventListener('pointerdown', event => {
      if (event.button !== 0) return;
      from = xOf(event);
      svg.setPointerCapture(event.pointerId);
    });
    svg.addEventListener('pointermove', event => {
      this.point(this.stepOf(xOf(event)), event.clientX, event.clientY);
      if (from === null || Math.abs(xOf(event) - from) < 5) return;
      chosen = chosen || svg.appendChild(shape('rect', {class: 'chosen', y: TOP, height: BOTTOM - TOP}));
      const [left, right] = [from, xOf(event)].map(x => this.px(this.stepOf(x))).sort((a, b) => a - b);
      chosen.setAttribute('x', left);
      chosen.setAttribute('width', right - left);
    });
    svg.addEventListener('pointerup', event => {
      const ends = [from, xOf(event)].map(x => this.stepOf(x)).sort((a, b) => a - b), dragged = chosen !== null;
      chosen?.remove();
      from = chosen = null;
      if (dragged)
        zoom(...ends);
      else
        this.point(this.stepOf(xOf(event)), event.clientX, event.clientY);
    });
    svg.addEventListener('pointercancel', () => {
      chosen?.remove();
      from = chosen = null;
    });
    svg.addEventListener('pointerleave', event => {
      if (event.pointerType !== 'touch') pointAway();
    });
    svg.addEventListener('dblclick', () => changeView({steps: null}));
    svg.addEventListener('keydown', event => this.press(event));
    svg.addEventListener('blur', pointAway);
  }

  press(event) {
    const {first, last} = this, at = this.cursor ?? (first + last) / 2,
                  pixel = (last - first) / (this.right - LEFT) * (event.shiftKey ? 20 : 1);
    const act = {
      ArrowLeft: () => this.moveTo(at - pixel, -1),
      ArrowRight: () => this.moveTo(at + pixel, 1),
      Home: () => this.moveTo(first, 1),
      End: () => this.moveTo(last, -1),
      '+': () => zoom(Math.max(first, at - (last - first) / 4), Math.min(last, at + (last - first) / 4)),
      '-': () => this.zoomOut(at),
      Escape: () => changeView({steps: null}),
    }[event.key === '=' ? '+' : event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
    if (this.svg !== document.activeElement) this.svg?.focus();
  }

  zoomOut(at) {
    if (!view.steps) return;
    const length = this.last - this.first, steps = [at - length, at + length];
    changeView({steps: null});
    const [first, last] = shownSteps();
    if (steps[0] > first || steps[1] < last) zoom(Math.max(first, steps[0]), Math.min(last, steps[1]));
  }

  // Moves the cursor to the first point of any line at `step` or beyond it in this direction.
  moveTo(step, direction) {
    const found = this.shownLines().flatMap(({steps}) => {
      const i = direction > 0 ? countBelow(steps, step) : countBelow(steps, step + 1e-9 * Math.abs(step)) - 1;
      return i >= 0 && i < steps.length && steps[i] >= this.first && steps[i] <= this.last ? [steps[i]] : [];
    });
    if (!found.length) return;
    const box = this.svg.getBoundingClientRect();
    this.cursor = direction > 0 ? Math.min(...found) : Math.max(...found);
    this.point(this.cursor, box.left + this.px(this.cursor), box.top + TOP);
  }

  // Shows the values of all lines at the step of the nearest point, at this place of the window.
  point(step, x, y) {
    const lines = this.shownLines(),
          places = lines.map(line => line.steps[nearest(line.steps, step)]).filter(at => at >= this.first && at <= this.last);
    if (!places.length) return;
    const at = places.reduce((best, place) => Math.abs(place - step) < Math.abs(best - step) ? place : best);
    const rows = lines.filter(({steps}) => at >= steps[0] && at <= steps[steps.length - 1]).map(line => {
      const i = nearest(line.steps, at), value = this.values(line)[i];
      const raw = value !== line.values[i] && !Number.isNaN(value) ? ` (${number(line.values[i])})` : '';
      return make(
          'tr', {}, make('td', {}, swatch(line.run), line.label), make('td', {}, number(value, 6) + raw),
          make('td', {class: 'soft'}, line.steps[i] === at ? '' : `step ${line.steps[i]}`));
    });
    const near = 4 * (this.last - this.first) / (this.right - LEFT);
    const restarts = shownRestarts(at - near, at + near)
                         .map(({run, step: place}) => make('div', {}, swatch(run), `${runs[run].name}: restart at step ${place}`));
    showTip(x, y, make('b', {}, `step ${at}`), make('table', {}, rows), restarts);
    for (const chart of charts) chart.mark(at);
  }

  mark(step) {
    if (!this.svg) return;
    this.cross.replaceChildren();
    if (step === null || step < this.first || step > this.last) return;
    const x = this.px(step).toFixed(1);
    this.cross.append(shape('line', {class: 'cross', x1: x, x2: x, y1: TOP, y2: BOTTOM}));
    for (const line of this.shownLines()) {
      const i = nearest(line.steps, step), value = this.values(line)[i];
      if (line.steps[i] === step && this.isDrawable(value))
        this.cross.append(this.pointAt(step, value, {class: `point ${color(line.run)}`, r: 4}));
    }
  }
}

function shownRestarts(first, last) {
  return runs.flatMap(
      (run, index) =>
          isShown(index) ? [...new Set(run.restarts)].filter(step => step >= first && step <= last).map(step => ({run: index, step})) : []);
}

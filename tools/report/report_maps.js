// The maps of precision errors of a report page: a row for a module, a column for a step.

// The color map viridis, which stays in order of lightness for the color-blind.
const STOPS = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];
const RED = [213, 0, 50];  // NaN or Inf

function mapColor(share) {
  const place = (share > 0 ? Math.min(1, share) : 0) * (STOPS.length - 1);  // NaN for a range without a size
  const stop = Math.min(Math.floor(place), STOPS.length - 2);
  return STOPS[stop].map((value, i) => Math.round(value + (place - stop) * (STOPS[stop + 1][i] - value)));
}

function readCell([row, step, decibels, clipped, flushed, amax, scales, expert = null, expertDecibels = null]) {
  return {row, step, decibels, clipped, flushed, amax, scales, expert, expertDecibels};
}

// The most frequent scales: "2^-9: 60%, 2^-8: 30% ...".
function scalesText({scales}) {
  const pairs = [];
  for (let i = 0; i < scales.length; i += 2) pairs.push([scales[i], scales[i + 1]]);
  const blocks = pairs.reduce((sum, pair) => sum + pair[1], 0);
  pairs.sort((a, b) => b[1] - a[1] || a[0] - b[0]);
  return pairs.slice(0, 4).map(([exponent, count]) => `2^${exponent}: ${percent(count / blocks)}`).join(', ') +
      (pairs.length > 4 ? ' ...' : '');
}

class ErrorMap {
  constructor(run, map, range) {
    Object.assign(this, {run, range, role: map.role, modules: map.modules, cells: map.cells.map(readCell)});
    this.steps = [...new Set(this.cells.map(cell => cell.step))].sort((a, b) => a - b);
    this.canvas = make('canvas', {
      tabindex: 0,
      role: 'img',
      'aria-label':
          `${runs[run].name}: ${map.role}, error of ${counted(map.modules.length, 'module')} in ${counted(this.steps.length, 'step')}`
    });
    this.mark = make('div', {class: 'cell', hidden: ''});
    this.ends = make('div', {class: 'ends'});
    const left = map.steps - this.steps.length;
    this.figure = make(
        'figure', {'data-map': `${run} ${map.role}`},
        make(
            'figcaption', {}, `${runs[run].name}: ${map.role}`,
            left ? make('span', {class: 'soft'}, `${this.steps.length} of ${map.steps} reports`) : ''),
        make(
            'div', {class: 'map'}, make('ol', {}, map.modules.map(module => make('li', {title: module}, make('bdi', {}, module)))),
            make('div', {class: 'cells'}, this.canvas, this.mark), this.ends));
    this.place = [0, 0];
    this.listen();
  }

  // A canvas has a pixel for a cell. Of more steps than columns, the worst cell of each column is shown.
  draw() {
    const [first, last] = shownSteps(), steps = this.steps.filter(step => step >= first && step <= last);
    this.figure.hidden = !isShown(this.run);
    this.mark.hidden = true;
    this.columns = Math.max(1, Math.min(steps.length, 500));
    const rows = this.modules.length, columnOf = new Map(steps.map((step, i) => [step, Math.floor(i * this.columns / steps.length)]));
    const badness = cell => cell.amax === null ? Infinity : cell.decibels === null ? -Infinity : -cell.decibels;
    this.shown = new Array(rows * this.columns).fill(null);
    for (const cell of this.cells) {
      const column = columnOf.get(cell.step), at = cell.row * this.columns + column;
      if (column !== undefined && (!this.shown[at] || badness(cell) > badness(this.shown[at]))) this.shown[at] = cell;
    }
    Object.assign(this.canvas, {width: this.columns, height: rows});
    this.canvas.style.height = `${16 * rows}px`;
    const context = this.canvas.getContext('2d'), image = context.createImageData(this.columns, rows);
    this.shown.forEach((cell, i) => {
      if (cell) image.data.set([...this.colorOf(cell), 255], 4 * i);
    });
    context.putImageData(image, 0, 0);
    this.ends.replaceChildren(...(
        steps.length ? [steps[0], steps[steps.length - 1]].map(step => make('span', {}, `step ${step}`)) : ['no values in these steps']));
    if (steps.length === 1) this.ends.lastChild.remove();
  }

  colorOf(cell) {
    if (cell.amax === null) return RED;
    return mapColor(cell.decibels === null ? 1 : (cell.decibels - this.range[0]) / Math.max(1e-9, this.range[1] - this.range[0]));
  }

  listen() {
    this.canvas.addEventListener('pointermove', event => {
      const box = this.canvas.getBoundingClientRect();
      this.point(
          Math.floor((event.clientX - box.left) / box.width * this.columns), Math.floor((event.clientY - box.top) / 16), event.clientX,
          event.clientY);
    });
    const away = () => {
      this.mark.hidden = true;
      pointAway();
    };
    this.canvas.addEventListener('pointerleave', event => {
      if (event.pointerType !== 'touch') away();
    });
    this.canvas.addEventListener('blur', away);
    this.canvas.addEventListener('keydown', event => {
      const move = {ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1]}[event.key];
      if (!move || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      const most = [this.columns - 1, this.modules.length - 1];
      const [column, row] = move.map((cells, i) => Math.min(most[i], Math.max(0, this.place[i] + cells))),
                     box = this.canvas.getBoundingClientRect();
      this.point(column, row, box.left + (column + 0.5) / this.columns * box.width, box.top + 16 * row);
    });
  }

  point(column, row, x, y) {
    if (column < 0 || column >= this.columns || row < 0 || row >= this.modules.length) return;
    this.place = [column, row];
    const cell = this.shown[row * this.columns + column];
    this.mark.hidden = false;
    Object.assign(
        this.mark.style, {left: `${100 * column / this.columns}%`, width: `${100 / this.columns}%`, top: `${16 * row}px`, height: '16px'});
    showTip(x, y, make('b', {}, `${this.modules[row]} ${this.role}`), ...(cell ? this.figures(cell) : [make('div', {}, 'no value')]));
  }

  figures(cell) {
    const line = text => make('div', {}, text);
    if (cell.amax === null) return [line(`step ${cell.step}: NaN or Inf`)];
    const lines = [
      line(`step ${cell.step}: ${cell.decibels === null ? 'exact' : `${number(cell.decibels, 4)} dB`}`),
      line(`clipped ${percent(cell.clipped)}, flushed ${percent(cell.flushed)}, amax ${number(cell.amax, 4)}`)
    ];
    if (cell.scales.length) lines.push(line(`scales ${scalesText(cell)}`));
    if (cell.expert !== null) lines.push(line(`worst expert ${cell.expert}: ${number(cell.expertDecibels, 4)} dB`));
    return lines;
  }
}

// All maps have one scale of colors, so that a color means the same error in each. It spans 3 dB or more, so that colors far apart mean
// errors far apart.
function commonRange() {
  let low = Infinity, high = -Infinity;
  for (const cell of runs.flatMap(run => run.maps).flatMap(map => map.cells)) {
    if (cell[2] === null) continue;
    low = Math.min(low, cell[2]);
    high = Math.max(high, cell[2]);
  }
  return low > high ? [0, 3] : [Math.min(low, high - 3), high];
}

function makeMaps() {
  by('precision').append(make('h2', {}, 'Precision'));
  if (!runs.some(run => run.maps.length)) {
    by('precision').append(make('p', {class: 'soft'}, 'No run has precision statistics; precision.report_interval turns them on.'));
    return [];
  }
  const range = commonRange(), made = runs.flatMap((run, index) => run.maps.map(map => new ErrorMap(index, map, range)));
  const bar = make('span');
  bar.style.background = `linear-gradient(to right, ${STOPS.map(stop => `rgb(${stop})`).join(', ')})`;
  by('precision')
      .append(
          make(
              'p', {},
              'Signal to quantization noise per module and step, all maps by one scale; a red cell holds NaN or Inf. A cell tells more under the pointer, or by arrow keys.'),
          make('div', {class: 'key'}, `${number(range[0], 3)} dB`, bar, `${number(range[1], 3)} dB, or exact`),
          make('div', {id: 'maps'}, made.map(map => map.figure)));
  return made;
}

// The part of a report page that shows what recipes cost a saved model, from what `mantissa analyze --json` wrote: a table of the recipes,
// a grid of errors for each of them (a row for a module, a column for a layer), and the parts of the model by what each costs alone.

const megabytes = bytes => bytes === null ? '-' : `${number(bytes / 1e6, 4)} MB`;
const fixed = (value, digits) => value === null ? '-' : value.toFixed(digits);

// Splits "layers.3.mlp.up" into its kind, "layers.*.mlp.up", and its layer; a module outside of the layers has none.
function kindAndLayer(module) {
  const found = /^(.*?)\.(\d+)\.(.*)$/.exec(module);
  return found ? [`${found[1]}.*.${found[3]}`, Number(found[2])] : [module, null];
}

function perplexityChange(loss, high) {
  const change = 100 * Math.expm1(loss - high);
  return `${change < 0 ? '' : '+'}${change.toFixed(2)}%`;
}

// The cells that a loss has in every table; without data there are none.
const LOSS_HEADS = ['loss', 'perplexity', 'change', 'KL', 'equal greedy'];
const lossCells = ({loss, kl, equal_greedy}, high) =>
    [loss.toFixed(5), Math.exp(loss).toFixed(3), perplexityChange(loss, high.loss), kl.toFixed(5), percent(equal_greedy)];

function recipesTable({high, recipes}) {
  const measured = high.loss !== null, sums = weights => weights.reduce(([s, n], {signal, noise}) => [s + signal, n + noise], [0, 0]);
  const row = ({recipe, linears, model, weights, problem, ...losses}) => {
    const [signal, noise] = sums(weights), none = measured && losses.loss === null;
    return [
      textCell(recipe, problem ? make('div', {class: 'soft'}, problem) : ''), fixed(linears.bits_per_weight, 3), megabytes(model.bytes),
      signal > 0 && noise > 0 ? fixed(10 * Math.log10(signal / noise), 2) : '-', ...(none ? LOSS_HEADS.map(() => '-') : measured ? lossCells(losses, high) : [])
    ];
  };
  return table(
      ['recipe', 'bits per weight of the linears', 'model', 'SQNR, dB', ...(measured ? LOSS_HEADS : [])],
      [{recipe: 'high', linears: {bits_per_weight: null}, model: high, weights: [], ...high}, ...recipes].map(row));
}

function errorText({module, sqnr_db, clipped, flushed, amax, bytes}) {
  return `${module}: ${sqnr_db === null ? 'exact' : `${number(sqnr_db, 4)} dB`}, clipped ${percent(clipped)}, flushed ${
      percent(flushed)}, amax ${optional(amax, 4)}, ${megabytes(bytes)}`;
}

// Recipes differ by more than their modules do, so each grid has a range of its own: of 3 dB or more, so that colors far apart mean errors
// far apart.
function errorGrid({recipe, weights}) {
  const decibels = weights.map(({sqnr_db}) => sqnr_db).filter(db => db !== null);
  const high = decibels.reduce((a, b) => Math.max(a, b), decibels.length ? -Infinity : 3);
  const low = Math.min(high - 3, decibels.reduce((a, b) => Math.min(a, b), Infinity));
  const layers = Math.max(0, ...weights.map(({module}) => 1 + (kindAndLayer(module)[1] ?? 0))), rows = new Map();
  for (const weight of weights) {
    const [kind, layer] = kindAndLayer(weight.module);
    if (!rows.has(kind)) rows.set(kind, new Array(layers).fill(null));
    rows.get(kind)[layer ?? 0] = weight;
  }
  const cell = weight => {
    if (!weight) return make('td');
    const td = make('td', {title: errorText(weight)}), db = weight.sqnr_db;
    td.style.background = `rgb(${mapColor(db === null ? 1 : (db - low) / Math.max(1e-9, high - low))})`;
    return td;
  };
  const head = make('tr', {}, make('th', {}, 'module, by layer'), Array.from({length: layers}, (_, i) => make('th', {}, i % 5 ? '' : i)));
  const colors = make('span');
  colors.style.background = `linear-gradient(to right, ${STOPS.map(stop => `rgb(${stop})`).join(', ')})`;
  return make(
      'figure', {'data-errors': recipe}, make('figcaption', {}, recipe),
      make('div', {class: 'key'}, `${number(low, 3)} dB`, colors, `${number(high, 3)} dB, or exact`),
      make(
          'div', {class: 'scroll'},
          make('table', {class: 'grid'}, head, [...rows].map(([kind, cells]) => make('tr', {}, make('th', {}, kind), cells.map(cell))))));
}

function partsTable({high, parts}) {
  const most = Math.max(1e-300, ...parts.map(({kl}) => kl));
  const row = ({modules, recipe, kl, bytes, ...losses}) => {
    const bar = make('div', {class: 'bar'});
    bar.style.width = `${100 * Math.max(0, kl) / most}%`;
    return [
      textCell(modules.length > 1 ? `${modules[0]} ... ${modules[modules.length - 1]} (${modules.length})` : modules[0]), recipe,
      ...lossCells({kl, ...losses}, high), make('td', {class: 'bars'}, bar), megabytes(bytes)
    ];
  };
  return table(['part', 'recipe', ...LOSS_HEADS, '', 'bytes'], [...parts].sort((a, b) => b.kl - a.kl).map(row));
}

function proposalText({high, proposal: {bits_per_weight, predicted_kl, file, ...losses}}) {
  const [loss, perplexity, change, kl, greedy] = lossCells(losses, high);
  return `${number(bits_per_weight, 4)} bits per weight of the linears: loss ${loss}, perplexity ${perplexity} (${change}), KL ${kl}, predicted ${
      predicted_kl.toFixed(5)}, equal greedy ${greedy}`;
}

function makeAnalysis(analysis) {
  const {model, step, data, seq_len, targets, recipes, parts, proposal} = analysis;
  const source = [
    step === null ? '' : `step ${step}`, data === null ? 'weights alone, without data' : `${targets} targets of ${data}, windows of ${seq_len} tokens`
  ];
  by('analyses').append(
      make('h2', {}, `What recipes cost ${model}`), make('p', {class: 'soft'}, source.filter(Boolean).join(' | ')), recipesTable(analysis),
      make('p', {}, 'Signal to quantization noise of the weights, by module and layer. A cell tells more under the pointer.'),
      ...recipes.filter(({weights}) => weights.length).map(errorGrid));
  if (parts.length) {
    by('analyses').append(
        make('h3', {}, 'Each part alone in a recipe, all others in high precision'),
        partsTable(analysis));
  }
  if (proposal)
    by('analyses').append(make('h3', {}, 'Proposal'), make('p', {}, proposalText(analysis)), make('pre', {}, JSON.stringify(proposal.file, null, 2)));
}

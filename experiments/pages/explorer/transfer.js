const index = positions(controls)
// Only depth 1 has a closed form at a finite time: deeper networks are trained to the end.
const last = times.length - 1, linear = index.depth === 0
index.course = linear && index.time < last ? depths.length + index.time : index.depth
const ignored = !linear && index.time < last
if (!linear) index.time = last
const simulating = mode.active === 1, view = layer.value
const WAYS = Object.keys(risks), stopped = index.time < last
const risk = (tables, way, at) =>
  stopped && way === "ridge transfer" ? NaN : number(tables[way], at)  // no closed form in time

const grids = {fine: {loads, angles, source: fine}, coarse: {
  loads: loads.filter((_, j) => j % every === every >> 1),
  angles: angles.filter((_, i) => i % every === 0), source: coarse}}
// the point lies on the fine grid; of the coarse one it is a point if both of its places are
const on_coarse = index.load % every === every >> 1 && index.theta % every === 0
const near = {
  theta: Math.min(Math.round(index.theta / every), grids.coarse.angles.length - 1),
  load: Math.min(Math.floor(index.load / every), grids.coarse.loads.length - 1)}

const best = (values) => {  // ways are in the order of their simplicity
  const least = Math.min(...values.filter((v) => !Number.isNaN(v)))
  return values.findIndex((v) => v <= 1.01 * least + 1e-6)
}
const paint = (grid, tables) => {
  const image = grid.source.data.image[0]
  grid.angles.forEach((_, i) => grid.loads.forEach((_, j) => {
    const values = WAYS.map((way) => risk(tables, way, {...index, theta: i, load: j}))
    image[i * grid.loads.length + j] = view === "which way wins"
      ? best(values) : values[0] - values[WAYS.indexOf(view)]
  }))
  grid.source.change.emit()
}
paint(grids.fine, risks)
paint(grids.coarse, simulated)
for (const [name, renderer] of Object.entries(renderers)) {
  renderer.visible = name.startsWith(simulating ? "coarse" : "fine")
    && name.endsWith(view === "which way wins" ? "wins" : "gain")
}
bar.visible = view !== "which way wins"
plot.title.text = (bar.visible ? `Gain of ${view} over scratch` : "Way of least risk")
  + (simulating ? ", simulated" : "")

// simulated gains that two standard errors do not tell from 0
const unsure = {x: [], y: []}
if (simulating && view !== "which way wins") grids.coarse.angles.forEach((angle, i) =>
  grids.coarse.loads.forEach((load, j) => {
    const at = {...index, theta: i, load: j}
    const gain = number(simulated["scratch"], at) - risk(simulated, view, at)
    if (Math.abs(gain) <= 2 * number(errors[view].gain, at)) { unsure.x.push(load); unsure.y.push(angle) }
  }))
unclear.data = unsure

// boundaries are known for a perfect source and training to the end
const edge = index.source > 0 || stopped ? null
  : {"linear transfer": ["linear_load", "linear_theta"], "fine-tuning": ["tuned_load", "tuned_theta"]}[view]
const [x, y] = edge ? edge.map((name) => series(edges[name], index, "point")) : [[], []]
boundary.data = {x, y}
legend.text = bar.visible
  ? `<p class="soft">${edge ? "Black line: the gain is 0, in the limit of large n and d. " : ""}`
    + `${simulating ? "×: within two standard errors of 0." : ""}</p>`
  : squares
point.data = {x: [loads[index.load]], y: [angles[index.theta]]}

const values = WAYS.map((way) => risk(risks, way, index))
const where = `n/d = ${shown(loads[index.load])} (n = ${samples[index.load]}, d = ${d}), θ = ${angles[index.theta].toFixed(0)}°`
const pair = (value, sim, error) => Number.isNaN(value) ? "<td>–</td>" :
  `<td>${shown(value)}<br><small>${shown(sim)} ± ${shown(error)}</small></td>`
const rows = WAYS.map((way, k) => {
  const at = {...index, ...near}, sim = risk(simulated, way, at), error = errors[way]
  const gain = number(simulated["scratch"], at) - sim
  return `<tr${k === best(values) ? ' class="best"' : ""}><th scope="row"><i style="background:${colors[k]}"></i>${way}</th>`
    + pair(values[k], sim, number(error.risk, at))
    + (k ? pair(values[0] - values[k], gain, number(error.gain, at)) : "<td></td>") + "</tr>"
})
const simulated_at = on_coarse ? "the same point"
  : `the nearest simulated point, n/d = ${shown(grids.coarse.loads[near.load])}, θ = ${grids.coarse.angles[near.theta].toFixed(0)}°`
const [own, towards] = Object.values(penalised).map((tables) => number(tables, index))
const used = notes.filter(([way, when]) => when === ""
  || when === "below" && samples[index.load] < d && (way !== "scratch" || !stopped)
  || when === "beyond" && samples[index.load] > d && (way !== "scratch" || !stopped)
  || when === "source" && index.source > 0 || when === "stopped" && stopped)
const exact = index.source > 0 || stopped
  ? "limits of large n and d where the source is finite or training is stopped, exact otherwise (fine-tuning: the limit)"
  : "exact at this n and d; fine-tuning: the limit of large n and d"
details.text = `<p aria-live="polite"><b>${where}</b>:<br><b>${WAYS[best(values)]}</b> wins, with a risk of ${shown(values[best(values)])}.</p>`
  + `<p>With a penalty at its best, ridge regression from scratch leaves ${shown(own)}`
  + `${own < values[best(values)] ? ", <b>less than every way below</b>" : ""}. A penalty towards the source (L2-SP) leaves ${shown(towards)}. `
  + `Scratch and fine-tuning below have no penalty.</p>`
  + (ignored ? "<p><b>Training time is not used:</b> a closed form for stopped training exists for depth 1 only. Shown: trained to the end.</p>" : "")
  + (index.source > 0 ? "<p>The source is fitted to a finite sample, whose labels are as noisy as the target's.</p>" : "")
  + (stopped ? "<p>Ridge transfer is left out: it has no closed form in time.</p>" : "")
  + `<div class="wide"><table><thead><tr><th scope="col">way</th><th scope="col">risk<br><small>simulated</small></th>`
  + `<th scope="col">gain<br><small>simulated</small></th></tr></thead><tbody>${rows.join("")}</tbody></table></div>`
  + `<p class="soft">Risk: mean of |β̂ − β<sub>t</sub>|², in units of |β<sub>t</sub>|². Gain: risk of scratch less that of the way. The simplest way wins whose risk is within 1 % of the least. `
  + `Risk and gain are ${exact}. Simulated: mean ± standard error over ${draws} data sets, at ${simulated_at}.</p>`
  + `<details><summary>Formulas, and the rows of the ledger they rest on</summary>`
  + WAYS.map((way) => `<h3>${way}</h3>` + listed(used.filter((note) => note[0] === way).map((note) => note.slice(2)))).join("")
  + `<p class="soft">Check a row: <code>sail-jax verify --claims 'features-are-fate/T3.9*'</code></p></details>`

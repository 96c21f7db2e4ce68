"use strict"
const data = JSON.parse(document.getElementById("data").textContent)
const {ways, grid} = data
const $ = (id) => document.getElementById(id)
const find = (name) => Bokeh.documents.map((doc) => doc.get_model_by_name(name)).find(Boolean)
const angles = Float64Array.from({length: data.angles}, (_, i) => i * 180 / (data.angles - 1))
const radians = (degrees) => degrees * (Math.PI / 180)  // as Python's
const special = {source: "inf", time: "inf", ridge: "best", depth: "inf"}

// Controls: `state` holds their values; null is the special value, such as all samples.
const state = {}, controls = {}
const between = (x, low, high) => Math.min(Math.max(x, low), high)
for (const box of document.querySelectorAll(".control[data-key]")) {
  const {key, low, high, step, value, python, other} = box.dataset
  const control = {
    low: Number(low), high: Number(high), step: Number(step), python,
    range: box.querySelector("[type=range]"), field: box.querySelector("[type=number]"),
    box: box.querySelector("[type=checkbox]"),
  }
  control.whole = control.step === 1
  control.rise = control.step ? null : Math.log(control.high / control.low)  // a logarithmic scale
  controls[key] = control
  state[key] = value === "" ? null : Number(value)
  control.last = state[key] ?? Number(other)  // the value when the box is unchecked again
  const to = (text) => set({[key]: read(key, text)})
  control.range.addEventListener("input", () => to(control.rise
    ? (control.low * Math.exp(control.rise * control.range.value / 200)).toPrecision(3) : control.range.value))
  control.field.addEventListener("input", () => to(control.field.value))
  control.field.addEventListener("change", show)  // a value out of range becomes the nearest one
  control.box?.addEventListener("change", () => set({[key]: control.box.checked ? null : control.last}))
}
const chosen = {view: $("view"), depth: $("depth")}
Object.assign(state, {view: chosen.view.value, depth: Number(chosen.depth.value)})
for (const [key, select] of Object.entries(chosen)) {
  select.addEventListener("change", () => set({[key]: read(key, select.value)}))
}

// Reads text as the value of a control; undefined if the text is not valid.
function read(key, text) {
  if (Object.hasOwn(chosen, key)) {
    text = text === special[key] ? "∞" : text
    if (![...chosen[key].options].some((option) => option.value === text)) return undefined
    return key === "view" ? text : text === "∞" ? Infinity : Number(text)
  }
  const {low, high, whole, box} = controls[key] ?? {}
  if (box && text === special[key]) return null
  const x = text.trim() === "" ? NaN : Number(text)
  if (low === undefined || !Number.isFinite(x)) return undefined
  return between(whole ? Math.round(x) : x, low, high)
}

function set(changes) {
  for (const [key, value] of Object.entries(changes)) {
    if (value === undefined) continue
    state[key] = value
    if (controls[key] && value !== null) controls[key].last = value
  }
  state.n = Math.min(state.n, 2 * state.d)
  show(document.activeElement)
  schedule()
}

// The controls show the state, except a field in which the reader types.
function show(typing) {
  for (const [key, {low, high, step, rise, range, field, box, last}] of Object.entries(controls)) {
    const value = state[key] ?? last, max = key === "n" ? 2 * state.d : high
    Object.assign(range, rise ? {min: 0, max: 200, step: 1} : {min: low, max, step})
    range.value = rise ? Math.log(value / low) / rise * 200 : value
    Object.assign(field, {min: low, max})
    if (typing !== field) field.value = value
    if (box) box.checked = state[key] === null
    range.disabled = field.disabled = state[key] === null || (key === "time" && state.depth !== 1)
    if (key === "time") box.disabled = state.depth !== 1
  }
  chosen.view.value = state.view
  chosen.depth.value = state.depth === Infinity ? "∞" : state.depth
}

// The address holds the state.
const spelled = () => "#" + Object.entries(state).map(([key, value]) =>
  `${key}=${value === null || value === Infinity ? special[key] : encodeURIComponent(value)}`).join("&")
function load() {
  const changes = {}
  for (const entry of location.hash.slice(1).split("&")) {
    const [key, text] = entry.split("=")
    try { if (Object.hasOwn(state, key)) changes[key] = read(key, decodeURIComponent(text ?? "")) } catch { /* no text */ }
  }
  set(changes)
}
let writing
const remember = () => {
  clearTimeout(writing)
  writing = setTimeout(() => history.replaceState(null, "", spelled()), 200)
}
addEventListener("hashchange", () => { if (location.hash !== spelled()) load() })

// Risks of all strategies, and gains over scratch, at one n and the angles of the map.
const isStopped = () => state.depth === 1 && state.time !== null
const needs_ridge = () => ["ridge transfer", "all", "paper"].includes(state.view)
function risks(n, degrees, with_ridge = true) {
  const {d, sigma, depth, ridge, time} = state
  const theta = degrees.map(radians), source = state.source ?? Infinity
  if (isStopped()) return formulas.stopped(n, d, theta, sigma, source, time)
  if (!with_ridge) return formulas.without_ridge(n, d, theta, sigma, depth, source)
  if (ridge !== null) return formulas.with_ridge(n, d, theta, sigma, depth, source, ridge)
  return formulas.transfer(n, d, theta, sigma, depth, source)
}
const first = (found) => Object.fromEntries(Object.entries(found).map(([name, values]) => [name, values[0]]))
const kept = {key: null, columns: new Map()}
function column(n) {  // cached until a setting changes that affects all of them
  const key = [...["d", "sigma", "depth", "source", "ridge", "time"].map((name) => state[name]), needs_ridge()].join()
  if (key !== kept.key) Object.assign(kept, {key, columns: new Map()})
  if (!kept.columns.has(n)) kept.columns.set(n, risks(n, angles, needs_ridge()))
  return kept.columns.get(n)
}
const compared = () => state.view === "all" ? ways : state.view === "paper" ? ways.slice(0, 4) : null

// Whether a risk is exact at this n and d, or a limit of large n and d.
const isExact = (way, n) => !isStopped() && (way === "scratch" || (way === "fine-tuning" && n >= state.d)
  || (way.endsWith(" transfer") && state.source === null))

// The strategies are in order of simplicity: the first within 1 % of the least risk is best.
const known = (x) => Number.isNaN(x) ? Infinity : x
const bound = (values) => 1.01 * values.reduce((least, v) => v < least ? v : least, Infinity) + 1e-6
const best = (values) => values.findIndex((v) => v <= bound(values))

// Lines on which values change sign, between the points of a grid: `cell` gives the values at four
// corners, or null where no line matters. No line is drawn where one of them is 0 or not known.
function zeros(xs, ys, cell) {
  const joined = new Map(), places = new Map()
  const join = (a, b) => { for (const [x, y] of [[a, b], [b, a]]) joined.set(x, [...joined.get(x) ?? [], y]) }
  const share = (a, b) => Math.abs(b) === Infinity ? (Math.abs(a) === Infinity ? 0.5 : 0)
    : Math.abs(a) === Infinity ? 1 : a / (a - b)
  for (let i = 0; i + 1 < xs.length; i++) for (let j = 0; j + 1 < ys.length; j++) {
    const corners = [[i, j], [i + 1, j], [i + 1, j + 1], [i, j + 1]], values = cell(corners)
    if (!values || values.some((v) => !(v < 0 || v > 0))) continue
    const names = [`h${i},${j}`, `v${i + 1},${j}`, `h${i},${j + 1}`, `v${i},${j}`], crossed = []
    names.forEach((name, k) => {
      const next = (k + 1) % 4, [x, y] = corners[k], [u, v] = corners[next]
      if (values[k] * values[next] > 0) return
      const t = share(values[k], values[next])
      places.set(name, [xs[x] + t * (xs[u] - xs[x]), ys[y] + t * (ys[v] - ys[y])])
      crossed.push(name)
    })
    if (crossed.length === 4 && values[0] * values.reduce((s, v) => s + v) > 0) crossed.push(crossed.shift())
    for (let k = 0; k < crossed.length; k += 2) join(crossed[k], crossed[k + 1])
  }
  const lines = [], done = new Set()
  const ends = [...joined].sort((a, b) => a[1].length - b[1].length)  // ends of open lines first
  for (const [start] of ends) {
    if (done.has(start)) continue
    const line = []
    for (let name = start; name !== undefined; name = joined.get(name).find((next) => !done.has(next))) {
      done.add(name)
      line.push(places.get(name))
    }
    if (joined.get(start).length === 2 && line.length > 2) line.push(line[0])  // closed
    lines.push(line)
  }
  return {xs: lines.map((line) => line.map(([x]) => x)), ys: lines.map((line) => line.map(([, y]) => y))}
}

// Estimators were averaged at some settings. `apart` ignores the coordinates of the point.
const simulated = (apart = false) => {
  if (state.d !== grid.d) return null
  const time = isStopped() ? state.time : null
  const index = {
    n: grid.n.indexOf(state.n), theta: grid.theta.indexOf(state.theta), sigma: grid.sigma.indexOf(state.sigma),
    source: grid.source.indexOf(state.source), ridge: grid.ridge.indexOf(state.ridge), time: grid.time.indexOf(time),
    depth: grid.depth.indexOf(state.depth === Infinity ? null : state.depth),
  }
  if (apart) index.n = index.theta = 0
  if (Object.values(index).some((k) => k < 0)) return null
  return {...index, course: isStopped() ? grid.depth.length + index.time : index.depth}
}
const size = (axis) => axis === "course" ? grid.depth.length + grid.time.length - 1 : grid[axis].length
const estimate = (name, index) => {
  const axes = data.axes[name.split(" of ").at(-1)]
  if (!axes || (isStopped() && name.endsWith("ridge transfer"))) return NaN
  return data.estimates[name][axes.reduce((k, axis) => k * size(axis) + index[axis], 0)]
}
function nearest() {
  const near = (values, x, scale) => values.reduce(
    (a, b) => Math.abs(scale(b) - scale(x)) < Math.abs(scale(a) - scale(x)) ? b : a)
  const same = (x) => x, layers = (x) => x === null ? 0 : 1 / x
  const or = (values, x) => x === null ? null : near(values.filter((v) => v !== null), x, Math.log)
  const depth = near(grid.depth, state.depth, layers)
  set({
    d: grid.d, depth: depth ?? Infinity, theta: near(grid.theta, state.theta, same),
    n: near(grid.n, state.n / state.d * grid.d, same), sigma: near(grid.sigma, state.sigma, same),
    source: or(grid.source, state.source), ridge: or(grid.ridge, state.ridge),
    time: depth === 1 ? or(grid.time, state.time) : null,
  })
}
$("nearest").addEventListener("click", nearest)

// Borders between regions: from strategy k to the strategies after it. Between two points, the border is
// where the strategy leaves the bound that the other strategies near by set.
function borders(among, found, winners) {
  return among.map((_, k) => (corners) => {
    const here = corners.map(([i, j]) => winners[i][j]), near = [...new Set(here)]
    if (near.length === 1 || !near.includes(k)) return null
    return corners.map(([i, j], corner) => {
      const risk = (way) => known(found[i][among[way]][j])
      const excess = near.filter((way) => way <= k).map(
        (way) => risk(way) - bound(near.filter((other) => other !== way).map(risk)))
      const value = Math.min(...excess)  // its sign is the best strategy's, also where a third strategy matters
      return here[corner] <= k ? Math.min(value, -1e-12) : Math.max(value, 1e-12)
    })
  })
}

const stroke = (color, dashes) => `<svg width="34" height="10" aria-hidden="true"><path d="M0 5H34"
  stroke="${color}" stroke-width="3" stroke-dasharray="${dashes}"/></svg>`
function drawMap() {
  const {d, view} = state, among = compared(), name = `gain of ${view}`
  const step = Math.ceil(2 * d / 120), n = []
  for (let k = step; k <= 2 * d; k += step) n.push(k)
  const image = new Float64Array(n.length * angles.length)
  const clear = (x) => Number.isNaN(x) ? x : between(x, -9, 9)
  const winners = new Map(), winner = (k) => {
    if (!winners.has(k)) winners.set(k, Array.from(angles, (_, j) => best(among.map((way) => column(k)[way][j]))))
    return winners.get(k)
  }
  n.forEach((k, i) => {
    const values = among ? winner(k) : column(k)[name].map(clear)
    for (let j = 0; j < angles.length; j++) image[j * n.length + i] = values[j]
  })
  const cells = find("cells"), NDArray = cells.data.image[0].constructor, half = 90 / (angles.length - 1)
  cells.data = {image: [new NDArray(image, [angles.length, n.length])], x: [step / 2 / d], y: [-half],
    dw: [n.length * step / d], dh: [180 + 2 * half]}
  const mapper = find("mapper")
  mapper.setv(among ? {palette: among.map((way) => data.colors[way]), low: -0.5, high: among.length - 0.5}
    : {palette: data.diverging, low: -1, high: 1})
  find("bar").visible = !among

  // Boundaries: where n is small or near d each one counts, and as the gain of fine-tuning is that of a
  // limit, parts of n do.
  const at = new Set(n)
  for (let k = 1; k < step; k++) at.add(k)
  for (let k = -3; k <= 3; k++) at.add(between(d + k, 1, 2 * d))
  if (view === "fine-tuning") for (let k = 0; k < 12; k++) at.add(d - step * 2 ** -k)
  const samples = [...at].sort((a, b) => a - b), found = samples.map(column)
  const loads = samples.map((k) => k / d), lines = {xs: [], ys: []}
  const gain = (corners) => corners.map(([i, j]) => found[i][name][j])
  for (const cell of among ? borders(among, found, samples.map(winner)) : [gain]) {
    const {xs, ys} = zeros(loads, angles, cell)
    lines.xs.push(...xs)
    lines.ys.push(...ys)
  }
  find("zeros").data = lines
  const isPrinted = view === "fine-tuning" && state.source === null && !isStopped()
  find("printed").data = isPrinted ? {xs: [[0, 1]], ys: [[60, 60]]} : {xs: [], ys: []}
  const index = view === "all" ? null : simulated(true), marks = {x: [], y: [], value: []}
  if (index) grid.n.forEach((k, i) => grid.theta.forEach((degrees, j) => {
    const here = {...index, n: i, theta: j}
    const value = among ? best(among.map((way) => estimate(way, here))) : estimate(name, here)
    if (Number.isNaN(value)) return
    marks.x.push(k / d)
    marks.y.push(degrees)
    marks.value.push(clear(value))
  }))
  find("estimated").data = marks
  find("point").data = {x: [state.n / d], y: [state.theta]}
  const ink = "var(--ink)", parts = []
  const gainless = (isPrinted ? "theory, corrected: no gain at cos θ = c/2" : "theory: no gain")
    + (isExact(view, 0) ? " (at this n and d)" : " (limit of large n and d)")
  if (among) parts.push(...among.map((way) => `<i style="background:${data.colors[way]}"></i>${way}`))
  parts.push(stroke(ink, "7 5") + (among ? "theory: another strategy is best from here" : gainless))
  if (isPrinted) parts.push(stroke("#0072B2", "none") + "theory, as printed: 60°")
  if (marks.x.length) parts.push(`<b class="ring"></b>estimator, averaged over ${grid.draws} data sets`)
  if (!among) parts.push("gain: orange helps, purple hurts; the colours end at ±1")
  if (image.some(Number.isNaN)) parts.push(`grey: ${isStopped() ? "no closed form in time" : "both means are infinite"}`)
  $("legend").innerHTML = parts.map((part) => `<span>${part}</span>`).join("")
}

const number = (x) => x === null || Number.isNaN(x) ? "–" : Math.abs(x) === Infinity ? (x < 0 ? "−∞" : "∞")
  : x.toFixed(4).replace(/^-(?=0\.0*$)/, "").replace("-", "−")
const listed = (notes) => [...new Set(notes.map(([part]) => part))].map((part) => `<h3>${part}</h3><ul>`
  + notes.filter((note) => note[0] === part).map(([, , id, text]) => `<li><code>${id}</code><br>${text}</li>`).join("")
  + "</ul>").join("") + `<p class="soft">Check a claim: <code>sail-jax verify --claims '${notes[0]?.[2]}'</code></p>`
const python = (name, given, names, module = "formulas") => `import math

import jax

from experiments.pages.explorer.${module} import ${name}

with jax.enable_x64(True):
    found = ${name}(${Object.entries(given).map(([key, value]) => `${key}=${value}`).join(", ")})
for name in ${names}:
    print(f"{name}: {found[name]:.4f}")`

function drawPoint() {
  const {n, d, theta, sigma, depth} = state, stopped = isStopped(), index = simulated()
  const found = first(risks(n, angles.map(() => theta))), values = ways.map((way) => found[way])
  const winner = best(values), paper = best(values.slice(0, 4))
  const average = (name) => index === null || Number.isNaN(estimate(name, index)) ? "" :
    `<br><small><data value="${estimate(name, index)}">${number(estimate(name, index))}</data> ± ${number(estimate(`error of ${name}`, index))}</small>`
  const cell = (name) => `<td><data value="${found[name]}">${number(found[name])}</data>${average(name)}</td>`
  const rows = ways.map((way, k) => `<tr${k === winner ? ' class="best"' : ""}><th scope="row"><i style="background:${data.colors[way]}"></i>${way}</th>`
    + cell(way) + (k ? cell(`gain of ${way}`) : "<td></td>") + `<td>${isExact(way, n) ? "exact" : "limit"}</td></tr>`)
  const averaged = index ? `<caption>Small: estimator, averaged over ${grid.draws} data sets, ± one standard error. Its closed form is averaged.</caption>` : ""
  const summary = `n/d = ${(n / d).toFixed(3)} (n = ${n}, d = ${d}), θ = ${Number(theta.toFixed(2))}°`
  $("map").setAttribute("aria-label", `Map: ${chosen.view.selectedOptions[0].text}, over load and angle. The point is at ${summary}.`)
  const notes = []
  if (!stopped && sigma > 0 && Math.abs(n - d) <= 1) notes.push("Within 1 of n = d the mean risk of training from scratch without a penalty is infinite. So is the mean risk of fine-tuning.")
  if (!stopped && found["linear transfer"] === Infinity) notes.push("Up to n = 2 the mean risk of linear transfer is infinite.")
  if (state.time !== null && depth !== 1) notes.push("The training time is ignored, because only depth 1 has a closed form for stopped training. The numbers are for training to the end.")
  if (stopped) notes.push("Ridge transfer lacks a closed form in time. Fits with a penalty are trained to the end.")
  if (state.source === 1 && sigma > 0) notes.push("With as many source samples as dimensions the source is infinitely long, and training that starts from it has an infinite risk.")
  if (state.source !== null) notes.push("The source is fitted to a finite sample, and its labels are as noisy as the target's.")
  const close = ways.filter((way, k) => k !== winner && Math.abs(values[k] - values[winner]) <= 1 / (4 * d)
    && !(isExact(way, n) && isExact(ways[winner], n)))
  $("summary").innerHTML = `<b>${summary}</b>: <b>${ways[winner]}</b> is best, with a risk of ${number(values[winner])}. `
    + `Among the paper's four strategies (no penalty when training from scratch), ${ways[paper]} is best, with ${number(values[paper])}.`
    + (close.length ? ` Within the error of the limits, 1/(4d) = ${number(1 / (4 * d))} to first order, are: ${close.join(", ")}.` : "")
  $("details").innerHTML = notes.map((note) => `<p>${note}</p>`).join("")
    + `<div class="wide"><table>${averaged}<thead><tr><th scope="col">strategy</th><th scope="col">risk</th><th scope="col">gain</th><th scope="col">known as</th></tr></thead><tbody>${rows.join("")}</tbody></table></div>`
  const given = {n, d, theta: `math.radians(${theta})`, sigma, depth: depth === Infinity ? "math.inf" : depth}
  for (const key of ["source", "ridge", ...stopped ? ["time"] : []]) given[key] = state[key] ?? controls[key].python
  $("transfer-python").textContent = python("transfer", given, "found")
  $("transfer-notes").lastElementChild.innerHTML = listed(data.notes.transfer.filter(([way, when]) => when === ""
    || when === "below" && n < d && !(way === "scratch" && stopped) || when === "beyond" && n > d && !(way === "scratch" && stopped)
    || when === "source" && state.source !== null || when === "stopped" && stopped))
}

const PARAMETERS = ["gamma", "decay", "tau", "ratio", "anchor", "duration"]
const CURVES = {noise: ["perturbed", "not perturbed"], tuning: ["old task", "new task"]}
function drawPretraining() {
  const found = formulas.pretraining(...PARAMETERS.map((key) => state[key]))
  const {ratio, anchor} = state
  for (const [plot, curves] of Object.entries(CURVES)) {
    const turn = found[`turn of ${curves[0]}`], least = found[`least ${curves[0]}`], rises = !Number.isNaN(turn)
    find(`${plot} curves`).data = Object.fromEntries(["time", ...curves].map((name) => [name, Array.from(found[name])]))
    find(`${plot} turn`).data = rises ? {x: [turn], y: [least]} : {x: [], y: []}
  }
  const told = (what, name) => Number.isNaN(found[`turn of ${name}`])
    ? `${what}: more pre-training never hurts here, because the loss does not rise again.`
    : `${what}: pre-training hurts from <b>t = <data value="${found[`turn of ${name}`]}">${found[`turn of ${name}`].toPrecision(2)}</data></b> on, where the loss is least, <b><data value="${found[`least ${name}`]}">${number(found[`least ${name}`])}</data></b>.`
  $("losses").innerHTML = `<p>${told("After noise", "perturbed")}`
    + (found.learned === data.width ? "" : ` Counted in modes: after ${found.learned} of ${data.width} learned modes (Definition 4.2), since 2dγ² exceeds the next σ.`) + "</p>"
    + `<p>${told("After fine-tuning, on the pre-training task", "old task")} Learning one mode more raises that loss, once fine-tuned to the end, if σ<sub>ft</sub>/σ<sub>pre</sub> = ${ratio} exceeds 2 + λ = ${2 + anchor}: <b>${ratio > 2 + anchor ? "it does" : "it does not"}</b>.</p>`
  $("pretraining-python").textContent = python("pretraining", Object.fromEntries(PARAMETERS.map((key) => [key, state[key]])),
    `("turn of perturbed", "least perturbed", "turn of old task", "least old task", "learned")`)
  $("pretraining-notes").lastElementChild.innerHTML = listed(data.notes.pretraining)
}

// Panels: lines over one axis, with their own sliders.
function drawPanel({name, x, lines, numbers, keys, notes}) {
  const found = formulas[name](...keys.map(({key, angle}) => angle ? radians(state[key]) : state[key]))
  find(`${name} curves`).data = Object.fromEntries([x, ...lines].map((line) => [line, Array.from(found[line])]))
  $(`${name}-numbers`).innerHTML = numbers.map(([key, label]) =>
    `<li>${label}: <b><data value="${found[key]}">${number(found[key])}</data></b></li>`).join("")
  const given = keys.map(({key, argument, angle}) => [argument, angle ? `math.radians(${state[key]})` : state[key]])
  $(`${name}-python`).textContent = python(name, Object.fromEntries(given),
    `(${numbers.map(([key]) => JSON.stringify(key)).join(", ")},)`, "panels")
  $(`${name}-notes`).lastElementChild.innerHTML = listed(notes)
}
const sections = [[PARAMETERS, drawPretraining],
  ...data.panels.map((panel) => [panel.keys.map(({key}) => key), () => drawPanel(panel)])]
const apart = new Set(sections.flatMap(([keys]) => keys))  // from the map

// One drawing serves all waiting events, and covers only the changes.
let waiting = false, drawn = {}
function schedule() {
  if (!waiting) setTimeout(draw)
  waiting = true
}
function draw() {
  waiting = false
  performance.mark("start")
  const changed = Object.keys(state).filter((key) => state[key] !== drawn[key])
  for (const [keys, drawSection] of sections) if (changed.some((key) => keys.includes(key))) drawSection()
  if (changed.some((key) => !apart.has(key))) { drawMap(); drawPoint() }
  drawn = {...state}
  remember()
  performance.measure("update", "start")
}

const dark = matchMedia("(prefers-color-scheme: dark)")
function paint() {
  const [ink, line, blue, red, ...others] = dark.matches ? ["#e6e9ee", "#3a4452", "#56B4E9", "#E69F00", "#F0E442", "#CC79A7"]
    : ["#1d2430", "#d9dde3", "#0072B2", "#D55E00", "#00795a", "#a8437f"]
  for (const {name, lines} of data.panels) {
    lines.forEach((curve, k) => { find(`${name}: ${curve}`).glyph.line_color = [blue, red, ...others][k] })
    $(`${name}-legend`).innerHTML = lines.map((curve, k) =>
      `<span>${stroke([blue, red, ...others][k], ["none", "7 5", "2 4", "12 4 2 4"][k])}${curve}</span>`).join("")
  }
  for (const name of ["map", "noise", "tuning", ...data.panels.map((panel) => panel.name)]) {
    const plot = find(name)
    for (const axis of [...plot.below, ...plot.left]) if (axis.axis_label_text_color !== undefined) axis.setv({
      axis_label_text_color: ink, major_label_text_color: ink, axis_line_color: ink, major_tick_line_color: ink})
    for (const grid of plot.center) grid.setv({grid_line_color: line})
    for (const [k, curve] of (CURVES[name] ?? []).entries()) find(curve).glyph.line_color = [blue, red][k]
    if (CURVES[name]) $(`${name}-legend`).innerHTML = CURVES[name].map((curve, k) => `<span>${stroke([blue, red][k], ["none", "7 5"][k])}${curve}</span>`).join("")
      + "<span>▼ more hurts from here</span>"
    if (CURVES[name]) find(`${name} mark`).glyph.setv({line_color: ink, fill_color: ink})
  }
  find("bar").major_label_text_color = ink
}

for (const button of document.querySelectorAll(".copy")) button.addEventListener("click", async () => {
  const text = button.previousElementSibling
  try { await navigator.clipboard.writeText(text.textContent); button.textContent = "Copied" }
  catch { getSelection().selectAllChildren(text); button.textContent = "Selected: copy it" }
})
Promise.all(Object.values(data.items).map((item) => Bokeh.embed.embed_item(item))).then(() => {
  paint()
  dark.addEventListener("change", paint)
  find("map").on_event("tap", ({x, y}) => set({n: between(Math.round(x * state.d), 1, 2 * state.d),
    theta: between(Math.round(2 * y) / 2, 0, 180)}))
  load()
})

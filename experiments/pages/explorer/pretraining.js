const index = positions(controls)
const times = series(tables["time"], index, "time")
const pick = (name) => series(tables[name], index, "time")
const noisy = pick("perturbed"), calm = series(tables["perturbed"], {...index, gamma: 0}, "time")
perturbed.data = {time: times, noisy, calm}
tuned.data = {time: times, old: pick("tuned old task"), fresh: pick("tuned new task")}
const turn = (name) => [0, 1].map((k) => number(tables[name], {...index, turn: k}))
const mark = (source, [time, loss]) => {
  source.data = Number.isNaN(time) ? {x: [], y: []} : {x: [time], y: [loss]}
}
const after_noise = turn("turn of perturbed"), after_tuning = turn("turn of tuned")
mark(perturbed_turn, after_noise)
mark(tuned_turn, after_tuning)

const learned = number(tables["inflection"], index)
const told = (what, [time, loss]) => Number.isNaN(time)
  ? `${what}: more pre-training never hurts here; the loss does not rise again.`
  : `${what}: pre-training hurts from <b>t = ${time.toPrecision(3)}</b> on, where the loss is least, <b>${shown(loss)}</b>.`
const ratio = controls.ratio.value, anchor = controls.anchor.value
details.text = `<p aria-live="polite">${told("After perturbation", after_noise)}`
  + (Number.isNaN(learned) ? "" : ` Counted in modes: after ${learned} of ${d} learned modes (Definition 4.2), since 2dγ² exceeds the next σ.`) + "</p>"
  + `<p aria-live="polite">${told("After fine-tuning, on the pre-training task", after_tuning)}</p>`
  + `<p>Learning one mode more raises that loss, once fine-tuned to the end, if σ<sub>ft</sub>/σ<sub>pre</sub> = ${ratio} exceeds 2 + λ = ${2 + Number(anchor)}: `
  + `<b>${Number(ratio) > 2 + Number(anchor) ? "it does" : "it does not"}</b>.</p>`
  + `<p class="soft">Closed forms, exact for gradient flow on the squared norm of W₁W₂ − A from W₁ = W₂ = e<sup>−τ</sup> I; A has equal left and right singular vectors, and its ${d} singular values are σ<sub>i</sub> = ${scale} i<sup>−decay</sup>. `
  + `Time is that of gradient flow at unit rate; losses are squared Frobenius norms.</p>`
  + `<details><summary>Formulas, and the rows of the ledger they rest on</summary>`
  + ["perturbation", "fine-tuning"].map((part) => `<h3>${part}</h3>` + listed(notes.filter((note) => note[0] === part).map((note) => note.slice(1)))).join("")
  + `</details>`

// Shared by both tabs. `index` says which position of every axis the controls are at.
const positions = (controls) => Object.fromEntries(
  Object.entries(controls).map(([axis, control]) => [axis, control.categories
    ? control.categories.indexOf(control.value)
    : Math.round((control.value - control.start) / control.step)]))
const offset = (table, index) => table.axes.reduce(
  (k, axis, i) => k * table.values.shape[i] + index[axis], 0)
const number = (table, index) => table.values[offset(table, index)]
// what a table has along its last axes that the controls do not choose
const series = (table, index, free) => Array.from(
  {length: table.values.shape[table.axes.indexOf(free)]}, (_, k) => number(table, {...index, [free]: k}))
const shown = (x) => x === 0 || Math.abs(x) >= 5e-4 ? x.toFixed(3) : x.toExponential(1)
const listed = (rows) => "<ul>" + rows.map(
  ([id, text]) => `<li><code>${id}</code><br>${text}</li>`).join("") + "</ul>"

"""What a page wears: its style sheet, and the script of its table."""

from sail_jax.drawing import pages

__all__ = ["SCRIPT", "STYLE"]

STYLE = (
    pages.STYLE
    + """
body { max-width: 76rem; } h3 { font-size: 1rem; margin: 1.2rem 0 .2rem; }
code, pre { font-family: ui-monospace, monospace; font-size: .85em; overflow-wrap: anywhere; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: .5rem;
      padding: .7rem; overflow-x: auto; white-space: pre-wrap; }
table { min-width: 0; width: 100%; } td.n, th.n { text-align: right; white-space: nowrap; }
.wide { max-height: 42rem; overflow: auto; } thead th { position: sticky; top: 0;
        background: var(--card); box-shadow: 0 1px var(--line); white-space: nowrap; }
#tensors td:first-child { min-width: 18rem; overflow-wrap: anywhere; }
#tensors td.t { min-width: 14rem; overflow-wrap: anywhere; }
ul.alert { list-style: none; padding: 0; } ul.alert li { border-left: .3rem solid #D55E00;
        background: var(--card); padding: .45rem .8rem; margin: .4rem 0; max-width: 60rem; }
.lead { font-size: 1.1rem; max-width: 60rem; overflow-wrap: anywhere; }
.bar { display: flex; gap: .6rem; align-items: center; flex-wrap: wrap; margin: .5rem 0; }
input, button { font: inherit; color: inherit; background: var(--card);
        border: 1px solid var(--line); border-radius: .3rem; padding: .2rem .5rem; }
input { min-width: 18rem; } th button { all: unset; cursor: pointer; font-weight: 600; }
th button:focus-visible { outline: 2px solid; } th[aria-sort=ascending] button::after
        { content: " ▲"; } th[aria-sort=descending] button::after { content: " ▼"; }
summary { cursor: pointer; } @media print { .wide { max-height: none; } .bar { display: none; } }
@media (prefers-color-scheme: dark) { img { filter:
        brightness(.9); } }
"""
)
SCRIPT = r"""
const table = document.getElementById('tensors'), size = 100;
const all = [...table.tBodies[0].rows], heads = [...table.tHead.rows[0].cells];
const bar = document.createElement('div'), find = document.createElement('input');
const said = document.createElement('span'), back = document.createElement('button');
const next = document.createElement('button');
let rows = all, page = 0;
bar.className = 'bar'; find.type = 'search'; find.placeholder = 'filter: words of a row';
find.setAttribute('aria-label', 'filter the tensors'); said.setAttribute('aria-live', 'polite');
back.textContent = 'previous'; next.textContent = 'next';
bar.append(find, said, back, next); table.parentNode.before(bar);
function show() {
  const last = Math.max(0, Math.ceil(rows.length / size) - 1);
  page = Math.min(Math.max(page, 0), last);
  const part = rows.slice(page * size, (page + 1) * size);
  table.tBodies[0].replaceChildren(...part);
  const from = rows.length ? page * size + 1 : 0;
  said.textContent = `${from}–${page * size + part.length} of ${rows.length}`;
  back.disabled = page === 0; next.disabled = page === last;
}
const texts = new Map(all.map(row => [row, row.textContent.toLowerCase()]));
let order = all;
function filter() {
  const words = find.value.toLowerCase().split(/\s+/);
  rows = order.filter(row => words.every(word => texts.get(row).includes(word)));
  page = 0; show();
}
function value(row, k) {
  const cell = row.cells[k], v = cell.dataset.v;
  return v === undefined ? cell.textContent : v === '' ? null : Number(v);
}
heads.forEach((head, k) => {
  const button = document.createElement('button');
  button.textContent = head.textContent; head.replaceChildren(button);
  button.addEventListener('click', () => {
    const down = head.getAttribute('aria-sort') !== 'descending';
    heads.forEach(one => one.removeAttribute('aria-sort'));
    head.setAttribute('aria-sort', down ? 'descending' : 'ascending');
    order = [...all].sort((p, q) => {
      const a = value(p, k), b = value(q, k);
      if (a === null || b === null) return (a === null) - (b === null);
      const less = typeof a === 'number' ? a - b : a.localeCompare(b, 'en', {numeric: true});
      return down ? -less : less;
    });
    filter();
  });
});
find.addEventListener('input', filter);
back.addEventListener('click', () => { page -= 1; show(); });
next.addEventListener('click', () => { page += 1; show(); });
show();
"""

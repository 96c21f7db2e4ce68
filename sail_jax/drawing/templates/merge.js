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

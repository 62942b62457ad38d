"use strict";
{
  const table = document.querySelector("#kernels");
  const form = document.querySelector("#filter");
  const count = document.querySelector("#count");
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const headers = [...table.tHead.rows[0].cells];

  const valueOf = (row, column) => row.cells[column].dataset.value ?? row.cells[column].textContent.trim();

  // What has no value comes last, in either order.
  const compare = (a, b, sign) => {
    if (a === "" || b === "") return (a === "") - (b === "");
    return sign * (isNaN(a) || isNaN(b) ? a.localeCompare(b, "en", { numeric: true }) : a - b);
  };

  headers.forEach((header, column) => {
    header.querySelector("button").addEventListener("click", () => {
      const down = header.getAttribute("aria-sort") === "ascending";
      headers.forEach((each) => each.removeAttribute("aria-sort"));
      header.setAttribute("aria-sort", down ? "descending" : "ascending");
      rows.sort((a, b) => compare(valueOf(a, column), valueOf(b, column), down ? -1 : 1));
      body.append(...rows);
    });
  });

  const filter = () => {
    const words = form.elements.words.value.toLowerCase().split(/\s+/).filter(Boolean);
    const chosen = [...form.querySelectorAll("select")].filter((each) => each.value);
    let left = 0;
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word))
        || !chosen.every((each) => row.dataset[each.name] === each.value);
      left += !row.hidden;
    }
    count.textContent = `${left} of ${rows.length} kernels`;
  };

  form.addEventListener("input", filter);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => setTimeout(filter));
  form.hidden = false;
  filter();
}

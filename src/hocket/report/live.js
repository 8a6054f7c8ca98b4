"use strict";
// Follows the runs: takes the parts that the server sends, puts them in their places, and has the charts drawn anew (page.js).
(() => {
  const find = (selector) => document.querySelector(selector);
  const places = { progress: "#runs-now", answers: "#answers", split: "#splits", table_head: "#table thead", table_body: "#table tbody", table_note: "#table-note", provenance: ".how" };
  const status = find("#connection");
  let problem = "";

  function ages() {
    for (const time of document.querySelectorAll("time[data-written]")) {
      const passed = Math.max(0, Date.now() / 1000 - Number(time.dataset.written));
      const text = passed < 90 ? `${Math.round(passed)} s` : passed < 5400 ? `${Math.round(passed / 60)} min` : `${Math.round(passed / 3600)} h`;
      time.textContent = `written ${text} ago`;
    }
  }
  function show({ parts, data, problem: found }) {
    for (const [name, selector] of Object.entries(places)) find(selector).innerHTML = parts[name]; // escaped by the server, as in the page itself
    for (const selector of ["h1", "title"]) find(selector).innerHTML = parts.title;
    find(".summary").innerHTML = parts.summary;
    document.dispatchEvent(new CustomEvent("hocket-data", { detail: data }));
    problem = found;
    ages();
  }
  const events = new EventSource("events");
  events.addEventListener("open", () => { status.textContent = "Following."; });
  events.addEventListener("message", (event) => {
    show(JSON.parse(event.data));
    status.textContent = problem || "Following.";
  });
  events.addEventListener("error", () => { status.textContent = "The connection is lost; this page tries again."; });
  setInterval(ages, 1000);
  ages();
})();

"use strict";
// Adds two things to a page that is whole without it: values under the pointer, and news while a run lasts.

const EVERY_MS = 1000;
let pointed = null; // where the pointer is: the section's id, which of its plots, how far to the right

function sayAt(plot, part) {
  const seconds = part * Number(plot.dataset.wall);
  const rows = plot.dataset.kind === "stack" ? shares(plot, part) : values(plot, part);
  show(plot, part, [clock(seconds), ...rows.map(([name, text]) => `${name} ${text}`)]);
}

function shares(plot, part) {
  const names = [...plot.querySelectorAll("path[data-name]")].map((path) => path.dataset.name);
  const rows = plot.dataset.rows.split(";").map((row) => row.split(","));
  const column = Math.min(rows[0].length - 1, Math.floor(part * rows[0].length));
  return names.map((name, i) => [name, rows[i][column] + "%"]).filter((row) => row[1] !== "0%");
}

function values(plot, part) {
  const [, , width, height] = plot.querySelector("svg").getAttribute("viewBox").split(" ").map(Number);
  return [...plot.querySelectorAll("path[data-name]")].map((path) => {
    const points = path.getAttribute("d").split(/[ML]/).slice(1).map((pair) => pair.split(" ").map(Number));
    const near = points.reduce((a, b) => (Math.abs(b[0] - part * width) < Math.abs(a[0] - part * width) ? b : a));
    return [path.dataset.name, inUnit((1 - near[1] / height) * Number(plot.dataset.max), plot.dataset.unit)];
  });
}

function inUnit(value, unit) {
  if (unit === "ratio") return Math.round(value * 100) + "%";
  if (unit === "seconds") return value < 1 ? (value * 1000).toPrecision(3) + " ms" : value.toPrecision(3) + " s";
  return Math.round(value) + (unit === "watts" ? " W" : "");
}

function clock(seconds) {
  if (seconds < 60) return seconds.toFixed(1) + " s";
  const [hours, minutes] = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60];
  return hours ? `${hours} h ${minutes} min` : `${minutes} min ${Math.floor(seconds % 60)} s`;
}

function show(plot, part, said) {
  hide();
  const canvas = plot.querySelector(".canvas");
  const cursor = canvas.appendChild(document.createElement("div"));
  cursor.className = "cursor";
  cursor.style.left = part * 100 + "%";
  const hint = canvas.appendChild(document.createElement("div"));
  hint.className = "hint";
  for (const line of said) hint.appendChild(document.createElement("div")).textContent = line;
  hint.style[part < 0.5 ? "left" : "right"] = `calc(${(part < 0.5 ? part : 1 - part) * 100}% + 10px)`;
}

function hide() {
  for (const left of document.querySelectorAll(".cursor, .hint")) left.remove();
}

function point() {
  const plot = pointed && document.querySelectorAll(`#${pointed.section} .plot`)[pointed.which];
  if (plot) sayAt(plot, pointed.part);
  else hide();
}

document.addEventListener("pointermove", (event) => {
  const canvas = event.target.closest && event.target.closest(".canvas");
  if (!canvas) {
    if (pointed) hide();
    pointed = null;
    return;
  }
  const box = canvas.getBoundingClientRect();
  const section = canvas.closest("section");
  const which = [...section.querySelectorAll(".canvas")].indexOf(canvas);
  const part = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
  pointed = { section: section.id, which, part };
  point();
});

// --- while a run lasts: only sections that changed are replaced, so nothing flickers and nothing scrolls away

const shown = {};

async function follow() {
  try {
    const answer = await fetch("page.json" + location.search, { cache: "no-store" });
    if (!answer.ok) throw new Error(answer.status);
    update(await answer.json());
  } catch (error) {
    say("The run cannot be reached: what you see is the last of it.");
  }
}

function update(news) {
  say(news.running ? "" : "The run has ended.");
  for (const [name, html] of Object.entries(news.sections)) {
    if (shown[name] === html) continue;
    shown[name] = html;
    document.getElementById(name).innerHTML = html;
  }
  point();
}

function say(text) {
  const connection = document.getElementById("connection");
  if (connection.textContent !== text) connection.textContent = text;
}

if (document.body.dataset.live) {
  const forever = () => follow().finally(() => setTimeout(forever, EVERY_MS));
  forever();
}

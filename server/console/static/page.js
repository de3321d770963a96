"use strict";
// What all pages share: they load their data again every two seconds, and say whether it is live.

const LOAD_MS = 2000;

const at = (id) => document.getElementById(id);

async function refresh(load) {
  try {
    await load();
    sayLive("live", "");
    at("looked").textContent = `, ${new Date().toLocaleTimeString()}`;
  } catch (error) {
    sayLive(`not live: ${error.message}`, "lost");
    at("looked").textContent = "";
  }
}

function sayLive(text, kind) {
  // A screen reader reads out what is set here, so it is set only where it changes.
  if (at("live").textContent === text) return;
  at("live").className = kind;
  at("live").textContent = text;
}

async function keepRefreshing(load) {
  if (!document.hidden) await refresh(load);
  setTimeout(() => keepRefreshing(load), LOAD_MS);
}

// The colours that a person has chosen, before the page is drawn; without a choice, those of the system.
try {
  const chosen = localStorage.getItem("keepstep-theme");
  if (chosen) document.documentElement.dataset.theme = chosen;
} catch { /* a browser that keeps nothing shows the colours of the system */ }

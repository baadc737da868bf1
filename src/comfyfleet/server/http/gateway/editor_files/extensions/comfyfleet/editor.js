// What ComfyUI's editor does differently on a fleet.
const { app } = window.comfyAPI.app
const { api } = window.comfyAPI.api

function logOut() {
  const form = document.createElement('form')
  form.method = 'post'
  form.action = 'logout'
  document.body.append(form)
  form.submit()
}

// The connection goes when a key is revoked or has expired.
async function logInAgain() {
  const answer = await fetch(api.apiURL('/users')).catch(() => null)
  if (answer?.status === 401) location.assign('login')
}

api.addEventListener('reconnecting', logInAgain)

// The graph to begin with may have nodes that no fleet has: then it is one that needs nothing.
const { defaultGraph, blankGraph } = window.comfyAPI.defaultGraph
const loadGraphData = app.loadGraphData

const canRun = (graph) => graph.nodes.every((node) => node.type in LiteGraph.registered_node_types)

async function firstGraph() {
  if (canRun(defaultGraph)) return undefined
  const graph = await (await fetch('templates/comfyfleet_colour.json')).json()
  return canRun(graph) ? graph : blankGraph
}

// The console's page of a job names one whose prompt is to be opened, once the editor has opened what it had.
// By a cookie: it is there after a log-in, too.
function takeAskedJob() {
  const id = document.cookie.match(/(?:^|; )comfyfleet_open_job=([0-9a-f-]{36})/)?.[1]
  if (id) document.cookie = 'comfyfleet_open_job=; path=/editor/; max-age=0; samesite=strict'
  return id
}

async function openJob(id) {
  const answer = await fetch(`/api/admin/jobs/${encodeURIComponent(id)}/details?files=false`)
  const { prompt } = answer.ok ? await answer.json() : {}
  if (prompt) await app.loadApiJson(prompt, `job-${id.slice(0, 8)}.json`)
}

app.loadGraphData = async function (graph, ...rest) {
  const loaded = await loadGraphData.call(this, graph ?? (await firstGraph()), ...rest)
  const asked = takeAskedJob()
  if (asked) setTimeout(() => openJob(asked))
  return loaded
}

const session = await (await fetch('session')).json()
const logOutButton = {
  icon: 'icon-[lucide--log-out]',
  label: 'Log out',
  tooltip: 'Log out, and forget what this browser keeps of your work',
  onClick: logOut
}
app.registerExtension({
  name: 'comfyfleet.editor',
  actionBarButtons: session.by_cookie ? [logOutButton] : []
})

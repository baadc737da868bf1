// Adapts ComfyUI's editor to a fleet.
const { app } = window.comfyAPI.app
const { api } = window.comfyAPI.api

function signOut() {
  const form = document.createElement('form')
  form.method = 'post'
  form.action = 'logout'
  document.body.append(form)
  form.submit()
}

// The server closes the WebSocket when the user's key is revoked or expires.
async function signInAgain() {
  const answer = await fetch(api.apiURL('/users')).catch(() => null)
  if (answer?.status === 401) location.assign('login')
}

api.addEventListener('reconnecting', signInAgain)

// If the fleets can't run the editor's default graph, a graph without a model is loaded instead.
const { defaultGraph, blankGraph } = window.comfyAPI.defaultGraph
const loadGraphData = app.loadGraphData

const canRun = (graph) => graph.nodes.every((node) => node.type in LiteGraph.registered_node_types)

async function initialGraph() {
  if (canRun(defaultGraph)) return undefined
  const graph = await (await fetch('templates/comfyfleet_colour.json')).json()
  return canRun(graph) ? graph : blankGraph
}

// A job's page in the console sets this cookie to open the job's prompt, after the editor has
// loaded its previous graph. A cookie is used because it is still present after the user has
// signed in.
function takeRequestedJobId() {
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
  const loaded = await loadGraphData.call(this, graph ?? (await initialGraph()), ...rest)
  const jobId = takeRequestedJobId()
  if (jobId) setTimeout(() => openJob(jobId))
  return loaded
}

const session = await (await fetch('session')).json()
const signOutButton = {
  icon: 'icon-[lucide--log-out]',
  label: 'Sign out',
  tooltip: 'Sign out and remove your drafts from this browser',
  onClick: signOut
}
app.registerExtension({
  name: 'comfyfleet.editor',
  actionBarButtons: session.by_cookie ? [signOutButton] : []
})

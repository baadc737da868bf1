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

app.loadGraphData = async function (graph, ...rest) {
  return await loadGraphData.call(this, graph ?? (await firstGraph()), ...rest)
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

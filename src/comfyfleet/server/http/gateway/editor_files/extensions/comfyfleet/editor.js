// What ComfyUI's editor does differently on a fleet.
const { app } = window.comfyAPI.app
const { api } = window.comfyAPI.api

// An answer of 401: the key was revoked, or has expired.
api.addEventListener('reconnecting', async () => {
  const answer = await fetch(api.apiURL('/users')).catch(() => null)
  if (answer?.status === 401) location.assign('login')
})

function logOut() {
  const form = document.createElement('form')
  form.method = 'post'
  form.action = 'logout'
  document.body.append(form)
  form.submit()
}

app.registerExtension({
  name: 'comfyfleet.editor',
  commands: [{ id: 'comfyfleet.logOut', label: 'Log out', icon: 'pi pi-sign-out', function: logOut }],
  async setup() {
    const session = await (await fetch('session')).json()
    if (!session.by_cookie) return
    app.extensionManager.command
  }
})

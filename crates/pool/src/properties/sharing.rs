//! Parsing of the values of `sharenfs` and `sharesmb`.
//!
//! Called when they are set, and again when a file system is shared: a pool may come from anywhere,
//! and the values go into the configurations of servers that run as root. Invariant: a parsed value
//! consists only of the characters allowed here, so it is one word of a command line or of a
//! configuration.

/// Parameters of an NFS export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NfsShare {
    /// Clients: hosts in the syntax of exports(5), and whether each is read only.
    pub clients: Vec<(String, bool)>,
    /// Mapping of users.
    pub squash: Squash,
    /// The uid of squashed users.
    pub anonymous_user: Option<u32>,
    /// The gid of squashed users.
    pub anonymous_group: Option<u32>,
    /// Changes are answered before they are durable (`async`).
    pub asynchronous: bool,
    /// Clients may use any port.
    pub insecure: bool,
    /// Security flavors, the preferred one first; empty: the server's default.
    pub security: Vec<&'static str>,
}

/// Users of clients that are mapped to the anonymous one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Squash {
    /// Only root.
    Root,
    /// None.
    None,
    /// All.
    All,
}

/// Parameters of an SMB share.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SmbShare {
    /// Name of the share, if it is not derived from the file system's.
    pub name: Option<String>,
    /// The share is read only.
    pub read_only: bool,
    /// Guests are allowed.
    pub guests: bool,
}

const SECURITY: [&str; 4] = ["sys", "krb5", "krb5i", "krb5p"];
/// Longest value, bytes.
const MOST: usize = 4096;
/// Longest name of a share.
const NAME_MOST: usize = 80;
/// Names with a special meaning in Samba.
const RESERVED: [&str; 6] = ["global", "homes", "printers", "print$", "ipc$", "admin$"];

/// Parses a value of `sharenfs`; `Ok(None)` for `off`, an error for an invalid one.
#[expect(clippy::result_unit_err, reason = "there is one sentence for whatever is wrong: the table's")]
pub fn nfs(text: &str) -> Result<Option<NfsShare>, ()> {
    let mut share = NfsShare {
        clients: Vec::new(),
        squash: Squash::Root,
        anonymous_user: None,
        anonymous_group: None,
        asynchronous: false,
        insecure: false,
        security: Vec::new(),
    };
    let everybody = |read_only| ("*".to_owned(), read_only);
    match text {
        "off" => return Ok(None),
        "on" => share.clients.push(everybody(false)),
        _ if text.len() > MOST => return Err(()),
        _ => {
            for word in text.split(',') {
                match word.split_once('=').map_or((word, None), |(name, value)| (name, Some(value))) {
                    ("rw", None) => share.clients.push(everybody(false)),
                    ("ro", None) => share.clients.push(everybody(true)),
                    ("rw", Some(all)) => share.clients.extend(hosts(all)?.into_iter().map(|host| (host, false))),
                    ("ro", Some(all)) => share.clients.extend(hosts(all)?.into_iter().map(|host| (host, true))),
                    ("sync", None) => share.asynchronous = false,
                    ("async", None) => share.asynchronous = true,
                    ("secure", None) => share.insecure = false,
                    ("insecure", None) => share.insecure = true,
                    ("root_squash", None) => share.squash = Squash::Root,
                    ("no_root_squash", None) => share.squash = Squash::None,
                    ("all_squash", None) => share.squash = Squash::All,
                    // Subtrees are never checked.
                    ("no_subtree_check", None) => {}
                    ("anonuid", Some(number)) => share.anonymous_user = Some(number.parse().map_err(drop)?),
                    ("anongid", Some(number)) => share.anonymous_group = Some(number.parse().map_err(drop)?),
                    ("sec", Some(all)) => {
                        let known = |one: &str| SECURITY.into_iter().find(|known| *known == one).ok_or(());
                        share.security = all.split(':').map(known).collect::<Result<_, _>>()?;
                    }
                    _ => return Err(()),
                }
            }
        }
    }
    if share.clients.is_empty() {
        share.clients.push(everybody(false));
    }
    Ok(Some(share))
}

/// Parses hosts separated by colons; IPv6 addresses are in brackets.
fn hosts(mut text: &str) -> Result<Vec<String>, ()> {
    let mut found = Vec::new();
    loop {
        let end = if text.starts_with('[') { text.find(']').ok_or(())? } else { 0 };
        let end = text.get(end..).and_then(|rest| rest.find(':')).map(|at| end + at);
        found.push(host(text.get(..end.unwrap_or(text.len())).ok_or(())?)?);
        match end {
            None => return Ok(found),
            Some(end) => text = text.get(end + 1..).ok_or(())?,
        }
    }
}

/// Parses one host into the syntax of exports(5): a network without the `@` that ZFS puts before
/// it.
fn host(text: &str) -> Result<String, ()> {
    let length = |text: &str, most: u8| text.parse::<u8>().is_ok_and(|length| length <= most);
    let network = |text: &str| {
        let (address, prefix) = text.split_once('/').map_or((text, None), |(address, prefix)| (address, Some(prefix)));
        match address.strip_prefix('[') {
            Some(rest) => {
                let address = rest.strip_suffix(']').and_then(|address| address.parse::<std::net::Ipv6Addr>().ok());
                address.is_some() && prefix.is_none_or(|prefix| length(prefix, 128))
            }
            None => {
                address.parse::<std::net::Ipv4Addr>().is_ok()
                    && prefix.is_none_or(|prefix| length(prefix, 32) || prefix.parse::<std::net::Ipv4Addr>().is_ok())
            }
        }
    };
    let plain = |text: &str, more: &str| {
        !text.is_empty()
            && text.len() <= 255
            && !text.starts_with('-')
            && text.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c) || more.contains(c))
    };
    match text.strip_prefix('@') {
        _ if network(text) => Ok(text.to_owned()),
        Some(behind) if network(behind) => Ok(behind.to_owned()),
        Some(group) if plain(group, "") => Ok(text.to_owned()),
        None if plain(text, "*?") => Ok(text.to_owned()),
        _ => Err(()),
    }
}

/// Parses a value of `sharesmb`; `Ok(None)` for `off`, an error for an invalid one.
#[expect(clippy::result_unit_err, reason = "as above")]
pub fn smb(text: &str) -> Result<Option<SmbShare>, ()> {
    let mut share = SmbShare::default();
    match text {
        "off" => return Ok(None),
        "on" => {}
        _ if text.len() > MOST => return Err(()),
        _ => {
            for word in text.split(',') {
                match word.split_once('=').map_or((word, None), |(name, value)| (name, Some(value))) {
                    ("rw", None) => share.read_only = false,
                    ("ro", None) => share.read_only = true,
                    ("guestok", Some("true")) => share.guests = true,
                    ("guestok", Some("false")) => share.guests = false,
                    ("name", Some(name)) if is_share_name(name) => share.name = Some(name.to_owned()),
                    _ => return Err(()),
                }
            }
        }
    }
    Ok(Some(share))
}

fn is_share_name(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    (1..=NAME_MOST).contains(&name.len())
        && name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name.chars().all(plain)
        && !RESERVED.contains(&name.to_ascii_lowercase().as_str())
}

/// Returns the default name of a file system's share: its name with underscores in place of
/// slashes, as in ZFS. `None` if that is no valid name of a share.
#[must_use]
pub fn share_name(filesystem: &str) -> Option<String> {
    let name: String =
        filesystem.chars().map(|c| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '_' }).collect();
    is_share_name(&name).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_zfs_are_taken_apart() {
        assert_eq!(nfs("off"), Ok(None));
        let on = nfs("on").unwrap().unwrap();
        assert_eq!((on.clients, on.squash), (vec![("*".to_owned(), false)], Squash::Root));
        let all = nfs(
            "rw=@10.0.0.0/8:host.example.org:[fe80::1]:[fd00::]/8,ro=*.lan:@trusted,no_root_squash,sec=krb5p:sys,anonuid=7,async",
        );
        let all = all.unwrap().unwrap();
        let clients: Vec<(&str, bool)> = all.clients.iter().map(|(host, only)| (host.as_str(), *only)).collect();
        assert_eq!(
            clients,
            [
                ("10.0.0.0/8", false),
                ("host.example.org", false),
                ("[fe80::1]", false),
                ("[fd00::]/8", false),
                ("*.lan", true),
                ("@trusted", true)
            ]
        );
        assert_eq!((all.squash, all.security, all.anonymous_user), (Squash::None, vec!["krb5p", "sys"], Some(7)));
        assert_eq!(nfs("no_root_squash").unwrap().unwrap().clients.len(), 1);
        assert_eq!(smb("off"), Ok(None));
        let share = SmbShare { name: Some("Films".to_owned()), read_only: true, guests: true };
        assert_eq!(smb("name=Films,ro,guestok=true"), Ok(Some(share)));
        assert_eq!(share_name("tank/home/ann b").as_deref(), Some("tank_home_ann_b"));
        assert_eq!(share_name("homes"), None);
    }

    #[test]
    fn nothing_else_gets_into_a_configuration() {
        for bad in [
            "",
            "yes",
            "on,rw",
            "rw=",
            "rw=a b",
            "rw=a\nb",
            "rw=-o",
            "rw=host(rw)",
            "rw=$(reboot)",
            "rw=`x`",
            "rw=a;b",
            "rw=\"",
            "rw=a/../b",
            "rw=[::1",
            "rw=[::1]x",
            "rw=10.0.0.0/33",
            "rw=@",
            "fsid=0",
            "crossmnt",
            "sec=none",
            "anonuid=-1",
            "anonuid=4294967296",
            "rw=\u{e4}",
            "rw=a,,ro",
            "replicas=/x@h",
        ] {
            assert_eq!(nfs(bad), Err(()), "{bad:?}");
        }
        for bad in [
            "",
            "name=",
            "name=global",
            "name=IPC$",
            "name=a/b",
            "name=a]\n[b",
            "name=-x",
            "path=/etc",
            "guestok=1",
            "name=a b",
        ] {
            assert_eq!(smb(bad), Err(()), "{bad:?}");
        }
        assert_eq!(nfs(&format!("rw={}", "a:".repeat(4000))), Err(()));
    }
}

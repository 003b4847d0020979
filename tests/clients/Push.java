import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.net.http.HttpResponse.BodyHandlers;
import java.net.http.HttpResponse.PushPromiseHandler;
import java.nio.file.Path;
import java.security.cert.X509Certificate;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ConcurrentHashMap;
import javax.net.ssl.SSLContext;
import javax.net.ssl.TrustManager;
import javax.net.ssl.X509ExtendedTrustManager;

/** Push.java URL BODY-FILE [off]: Java speaks HTTP/2 over TLS only here (it would ask for an upgrade over http://). */
class Push {
    public static void main(String[] args) throws Exception {
        SSLContext context = SSLContext.getInstance("TLS");
        context.init(null, new TrustManager[] {new Trusting()}, null);
        HttpClient client = HttpClient.newBuilder().sslContext(context).build();
        HttpRequest request = HttpRequest.newBuilder(URI.create(args[0] + "/v1/chat/completions"))
            .header("content-type", "application/json")
            .header("evap-push", "blocks")
            .POST(HttpRequest.BodyPublishers.ofFile(Path.of(args[1])))
            .build();
        var promised = new ConcurrentHashMap<HttpRequest, CompletableFuture<HttpResponse<String>>>();
        PushPromiseHandler<String> handler = PushPromiseHandler.of(r -> BodyHandlers.ofString(), promised);
        HttpResponse<String> main = args.length > 2
            ? client.send(request, BodyHandlers.ofString())
            : client.sendAsync(request, BodyHandlers.ofString(), handler).get();
        print(main.version() + " " + main.headers().firstValue("evap-push").orElse("none"), main.body());
        for (var entry : promised.entrySet()) {
            print(entry.getKey().method() + " " + entry.getKey().uri().getPath(), entry.getValue().get().body());
        }
    }

    static void print(String title, String body) {
        System.out.print(title + "\n" + body + "\0\n");
    }

    /** The certificate is made anew by each server under test. */
    static class Trusting extends X509ExtendedTrustManager {
        public void checkClientTrusted(X509Certificate[] c, String a) {}
        public void checkServerTrusted(X509Certificate[] c, String a) {}
        public void checkClientTrusted(X509Certificate[] c, String a, java.net.Socket s) {}
        public void checkServerTrusted(X509Certificate[] c, String a, java.net.Socket s) {}
        public void checkClientTrusted(X509Certificate[] c, String a, javax.net.ssl.SSLEngine e) {}
        public void checkServerTrusted(X509Certificate[] c, String a, javax.net.ssl.SSLEngine e) {}
        public X509Certificate[] getAcceptedIssuers() { return new X509Certificate[0]; }
    }
}
